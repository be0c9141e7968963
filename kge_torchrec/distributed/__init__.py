"""Processes, collectives and dense parameters on several ranks."""
