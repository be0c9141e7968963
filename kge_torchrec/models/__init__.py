"""Scorers, losses, regularizers and objectives."""
