"""Exact filtered ranking and its metrics."""
