"""Train: session, trainer, checkpoints and run folders."""
