"""A read-only HTTP server that answers queries with a trained model."""
