"""Words of shared memory by which processes tell each other how far they are, and waiting for one.

A word is written by one process alone, and only grows.  What was written before ``publish`` is seen
by whoever saw the word in ``wait_for``: the store has release and the load acquire semantics, on
any processor.
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

# Looks at a word before the processor is offered to others; before this process sleeps (a few
# milliseconds if nobody takes the offer); before the caller hears that it waits (some 20 ms).
_SPINS, _YIELDS, _NAPS = 2_000, 10_000, 30
_FIRST_NAP, _LONGEST_NAP = 50, 1_000  # microseconds


@kernel
def publish(words: np.ndarray, index: int, value: int) -> None:
    """words[index] = value, once everything written before can be seen."""
    _store_release(words, index, value)


@kernel
def read(words: np.ndarray, index: int) -> int:
    """words[index]; what its writer wrote before can be seen."""
    return _load_acquire(words, index)


@kernel
def wait_for(words: np.ndarray, index: int, value: int, slept: bool) -> bool:
    """Returns once words[index] >= value, or False after some 20 ms.

    It first keeps its processor, then offers it to others, then sleeps: a processor that slept
    takes long to wake.  slept: whether it has slept for this already, and had better go on.
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
