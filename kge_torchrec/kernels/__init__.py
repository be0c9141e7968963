"""Compilation by numba: decorators and threads (``jit.py``), the cache on disk (``cache.py``)."""
