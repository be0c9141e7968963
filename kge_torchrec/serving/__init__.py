"""A small server that answers questions about a trained model over HTTP; it writes nothing."""
