"""Epoch order: which example comes at which position of an epoch.

An order is a function of (seed, epoch, position) only, never of the world size.  It is computed
position by position, so every rank computes its own share in memory of the batch's size; a stored
permutation of 1.4 billion triples would take 10 GiB per rank.

Shapes: T triples, M positions, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kge_torchrec.data.shuffle import ROUNDS as ROUNDS
from kge_torchrec.data.shuffle import EpochShuffle as EpochShuffle
from kge_torchrec.kernels.jit import kernel
from kge_torchrec.kernels.random_streams import mix, permute

Order = Callable[[np.ndarray], np.ndarray]  # (M,) positions of an epoch -> (M,) examples


def sample_distinct(
    sizes: np.ndarray, count: int, numbers: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """Sample ``count`` different positions in [0, sizes[i]) for every i, or all if there are fewer.

    The positions for i are the first of the permutation that its size, its number and the keys
    make, and depend on nothing else.

    Args:
        sizes: (Q,) int64.
        count: Positions for each i.
        numbers: (Q,) int64.
        keys: (ROUNDS,) uint64.

    Returns:
        The positions for all i, one after another, int64.
    """
    out = np.empty(np.minimum(sizes, count).sum(), np.int64)
    _sample_distinct(sizes, count, numbers.view(np.uint64), keys, out)
    return out


@kernel
def _sample_distinct(
    sizes: np.ndarray, count: int, numbers: np.ndarray, keys: np.ndarray, out: np.ndarray
) -> None:
    own = np.empty_like(keys)
    start = 0
    for i in range(len(sizes)):
        drawn = out[start : start + min(sizes[i], count)]
        for position in range(len(drawn)):
            drawn[position] = position
        if sizes[i] > count:
            for turn in range(len(keys)):
                own[turn] = mix(keys[turn] ^ mix(numbers[i] + np.uint64(turn)))
            half = np.uint64(1)
            while np.uint64(1) << (half + half) < np.uint64(sizes[i]):
                half += np.uint64(1)
            permute(drawn.view(np.uint64), own, half, np.uint64(sizes[i]))
        start += len(drawn)
