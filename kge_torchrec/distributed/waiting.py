"""Progress counters in shared memory: publish, read and wait for a word.

Each word has a single writer and only grows.  Stores have release semantics and loads acquire
semantics, on any processor: a process that reads a word sees everything that its writer wrote
before ``publish``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.extending import intrinsic

from kge_torchrec.kernels.jit import kernel

_WORD = 8  # bytes


def _address(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [arguments[1]])


def _load(typing_context: Any, words: Any, index: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments)
        return builder.load_atomic(address, "acquire", _WORD)

    return types.int64(words, types.int64), generate


def _store(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments)
        builder.store_atomic(arguments[2], address, "release", _WORD)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


_load_acquire: Any = intrinsic(_load)
_store_release: Any = intrinsic(_store)
_sched_yield: Any = types.ExternalFunction("sched_yield", signature(types.int32))
_usleep: Any = types.ExternalFunction("usleep", signature(types.int32, types.uint32))

# Number of checks while spinning, then while yielding (a few milliseconds on an idle core), then
# while sleeping (about 20 ms).
_SPINS, _YIELDS, _NAPS = 2_000, 10_000, 30
_FIRST_NAP, _LONGEST_NAP = 50, 1_000  # microseconds


@kernel
def publish(words: np.ndarray, index: int, value: int) -> None:
    """Set words[index] to value, with release semantics."""
    _store_release(words, index, value)


@kernel
def read(words: np.ndarray, index: int) -> int:
    """Return words[index], with acquire semantics."""
    return _load_acquire(words, index)


@kernel
def wait_for(words: np.ndarray, index: int, value: int, slept: bool) -> bool:
    """Wait until words[index] >= value.

    It spins, then yields the core to other processes, then sleeps, because waking a sleeping core
    is slow.

    Args:
        words: int64 words in shared memory.
        index: The word to wait for.
        value: The value to reach.
        slept: Whether an earlier call for this value already slept; then it sleeps at once.

    Returns:
        True as soon as the word has reached the value, False after about 20 ms.
    """
    if not slept:
        for _ in range(_SPINS):
            if _load_acquire(words, index) >= value:
                return True
        for _ in range(_YIELDS):
            if _load_acquire(words, index) >= value:
                return True
            _sched_yield()
    nap = _LONGEST_NAP if slept else _FIRST_NAP
    for _ in range(_NAPS):
        if _load_acquire(words, index) >= value:
            return True
        _usleep(nap)
        nap = min(nap * 2, _LONGEST_NAP)
    return _load_acquire(words, index) >= value
