"""The hand-rolled backend: all_to_all exchange and a sparse optimizer."""
