"""Fused operators, their implementations, and their compilation by numba (``jit.py``)."""
