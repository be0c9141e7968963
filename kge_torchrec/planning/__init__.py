"""Predict memory and step time for a graph and devices."""
