"""TorchRec's backend of the entity table."""
