"""Decorators that compile functions with numba, and the number of threads that kernels use.

    @helper           called by kernels only; its code becomes a part of each kernel that calls it
    @kernel           called from Python, on one thread
    @block_kernel(16) called from Python, over blocks of 16 items on several threads (``blocks.py``)

A helper may take other fastmath flags than the kernel that calls it. Each instruction keeps the
flags of the function it was written in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
from numba import njit

from kge_torchrec.kernels.cache import KernelCache

# Fastmath flags of LLVM. A sum may run in vector lanes; a product may be fused with a sum; both.
SUMS = frozenset({"reassoc", "nsz"})
FUSED = frozenset({"contract"})
FUSED_SUMS = SUMS | FUSED
EXACT: frozenset[str] = frozenset()

# Work below this many elements is done before a second thread wakes.
SERIAL_ELEMENTS = 1 << 17


def helper(function: Callable[..., Any] | None = None, *, fastmath: frozenset[str] = EXACT) -> Any:
    """Compile a function that only kernels call.

    LLVM inlines it into every caller. Otherwise each caller would hold a copy of its own, and the
    copy that runs would depend on which kernel was loaded first: a process that compiles and a
    process that reads the cache would compute different last digits.

    Args:
        function: The function; None where the decorator has arguments.
        fastmath: Flags of LLVM for its instructions.
    """
    if function is None:
        return partial(helper, fastmath=fastmath)
    return _compiled(
        function, fastmath, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
    )


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    fastmath: frozenset[str] = EXACT,
    parallel: bool = False,
) -> Any:
    """Compile a function that Python calls, and keep the result on disk.

    No other kernel may call it (see ``helper``).

    Args:
        function: The function; None where the decorator has arguments.
        fastmath: Flags of LLVM for its instructions.
        parallel: Whether ``prange`` uses several threads.
    """
    if function is None:
        return partial(kernel, fastmath=fastmath, parallel=parallel)
    compiled = _compiled(function, fastmath, parallel=parallel, no_cfunc_wrapper=True)
    compiled._cache = KernelCache(function)
    return compiled


def threads_for(blocks: int, work: int) -> int:
    """Return the number of threads for a number of blocks, and set it in numba.

    A process of one thread never touches numba's threads: starting them slows torch's
    operators down by a third.

    Args:
        blocks: Number of parts that the work can be split into.
        work: Elements that are read or written.
    """
    import torch  # imported late: reading triples does not need it

    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when numba is loaded
    threads = max(1, min(torch.get_num_threads(), most, blocks))
    if threads == 1 or work < SERIAL_ELEMENTS:
        return 1
    numba.set_num_threads(threads)
    return threads


def _compiled(function: Callable[..., Any], fastmath: frozenset[str], **options: Any) -> Any:
    """Return numba's dispatcher, with every flag set: numba takes a missing one from the caller."""
    flags = set(fastmath) or False
    return njit(nogil=True, error_model="numpy", fastmath=flags, **options)(function)
