"""The input of an embedding lookup: the distinct ids of a batch, in TorchRec's jagged tensors.

TorchRec has no wheels for macOS and Windows.  Where it is missing, stand-ins take the place of its
tensors: the hand-rolled engine needs nothing of them but the values, so it trains there as well.

Shapes: M ids, U distinct ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import ENTITY
from kge_torchrec.kernels.jit import helper, kernel

try:
    from torchrec import JaggedTensor, KeyedJaggedTensor
    from torchrec.streamable import Pipelineable as _Pipelineable
except ImportError:

    class _Pipelineable:  # type: ignore[no-redef]
        """Stand-in for TorchRec's base class of batches."""

    class JaggedTensor:  # type: ignore[no-redef]
        """Stand-in: values (M, ...) of one feature."""

        def __init__(self, values: Tensor, lengths: Tensor | None = None, **_: Any):
            self._values = values

        def values(self) -> Tensor:
            return self._values

    class KeyedJaggedTensor(JaggedTensor):  # type: ignore[no-redef]
        """Stand-in: values (M,) under one key."""

        def __init__(self, keys: list[str], values: Tensor, lengths: Tensor, **_: Any):
            super().__init__(values)

        def to(self, device: Any, non_blocking: bool = False) -> KeyedJaggedTensor:
            return self._with(self._values.to(device=device, non_blocking=non_blocking))

        def pin_memory(self) -> KeyedJaggedTensor:
            return self._with(self._values.pin_memory())

        def record_stream(self, stream: Any) -> None:
            self._values.record_stream(stream)

        def _with(self, values: Tensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor([], values, values)


__all__ = ["LOOKUP_BAGS", "JaggedTensor", "KeyedJaggedTensor", "Pipelineable", "as_feature",
           "distinct"]  # fmt: skip

B = TypeVar("B", bound="Pipelineable")


@dataclass
class Pipelineable(_Pipelineable):
    """A dataclass whose tensors (and jagged tensors) move together; other fields stay."""

    def _map(self: B, change: Callable[[Any], Any]) -> B:
        return replace(self, **{name: change(getattr(self, name)) for name in self._tensors()})

    def _tensors(self) -> list[str]:
        names = (field.name for field in fields(self))
        return [name for name in names if hasattr(getattr(self, name), "record_stream")]

    def to(self: B, device: torch.device, non_blocking: bool = False) -> B:
        return self._map(lambda x: x.to(device=device, non_blocking=non_blocking))

    def pin_memory(self: B) -> B:
        return self._map(lambda x: x.pin_memory())

    def record_stream(self, stream: Any) -> None:
        for name in self._tensors():
            getattr(self, name).record_stream(stream)


# Bags per lookup, by device type.  The rows are the same with any number of bags, but FBGEMM's CUDA
# kernels give each bag one thread or one warp, so one bag would be walked by a single one.  The
# number is the same on all ranks and in all steps: otherwise TorchRec takes batches for batches of
# variable size and sends them in a slower way.
LOOKUP_BAGS = {"cpu": 1, "cuda": 4096}


def as_feature(ids: Tensor, bags: int = 1) -> KeyedJaggedTensor:
    """Return entity ids as the input of the lookup, spread evenly over bags.

    The rows come back as ``collection(...)[ENTITY].values()``, (M, D), in the order of the ids.

    Args:
        ids: (M,) int64; M may be 0.
        bags: Number of bags, see ``LOOKUP_BAGS``.
    """
    count = ids.numel()
    lengths = torch.full((bags,), count // bags, dtype=torch.int64)
    lengths[: count % bags] += 1
    return KeyedJaggedTensor(
        keys=[ENTITY],
        values=ids,
        lengths=lengths,
        stride=bags,
        # Otherwise TorchRec copies them from the device, and waits.
        length_per_key=[count],
        offset_per_key=[0, count],
    )


_BITS = 8  # bits of an id that one pass sorts by; their counts fit the nearest cache
_VALUES = 1 << _BITS


@kernel
def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct ids in ascending order, and the place of each id among them.

    The result is that of ``np.unique(ids, return_inverse=True)``.  A radix sort finds it in two to
    four passes, as ids are whole numbers below the number of entities.

    Args:
        ids: (M,) int64, none negative (not checked); M may be 0.

    Returns:
        The distinct ids (U,) and the places (M,), both int64.
    """
    places = _sorted_places(ids)
    unique, inverse = np.empty_like(ids), np.empty_like(ids)
    count, last = 0, np.int64(-1)
    for place in places:
        count += ids[place] != last  # no branch, since no processor could predict it
        last = ids[place]
        unique[count - 1] = last
        inverse[place] = count - 1
    return unique[:count].copy(), inverse


@helper
def _sorted_places(ids: np.ndarray) -> np.ndarray:
    """Return the places (M,) of the ids in ascending order; equal ids keep their order."""
    largest = np.int64(0)
    for number in ids:
        largest = max(largest, number)
    places, other = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    for i in range(len(ids)):  # np.arange takes a fifth of a second to compile
        places[i] = i
    shift = 0
    while shift < 64 and largest >> shift:
        starts = np.zeros(_VALUES + 1, np.int64)
        for number in ids:
            starts[((number >> shift) & (_VALUES - 1)) + 1] += 1
        for value in range(_VALUES):
            starts[value + 1] += starts[value]
        for place in places:
            value = (ids[place] >> shift) & (_VALUES - 1)
            other[starts[value]] = place
            starts[value] += 1
        places, other = other, places
        shift += _BITS
    return places
