"""Compare training with other systems on the same graph."""
