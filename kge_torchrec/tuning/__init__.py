"""Search hyperparameters."""
