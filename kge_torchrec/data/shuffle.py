"""The shuffle of an epoch: a keyed permutation, computed position by position.

Shapes: M positions.
"""

from __future__ import annotations

import numpy as np

from kge_torchrec.kernels.jit import helper, kernel

ROUNDS = 6


class EpochShuffle:
    """A keyed pseudo-random permutation of [0, size), different for every (seed, epoch).

    The permutation is a Feistel network (Luby and Rackoff 1988) on the next even power of two.  It
    is applied until the result lies inside the range (Black and Rogaway 2002).
    """

    def __init__(self, size: int, seed: int, epoch: int):
        self.size = size
        self._half = max(1, (int(size - 1).bit_length() + 1) // 2)
        # The spawn key is mixed in apart from the seed, so (0, 1) and (1, 0) share nothing.
        keys = np.random.SeedSequence(seed, spawn_key=(epoch,))
        self._keys = keys.generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the examples (M,) int64 at some positions (M,) of the epoch."""
        out = positions.astype(np.uint64)
        _permute(out, self._keys, np.uint64(self._half), np.uint64(self.size))
        return out.view(np.int64)


_BLOCK = 1024  # values per block; a block stays in the nearest cache


# Scalars below stay np.uint64 throughout: numba makes a float of uint64 with a signed integer.
@kernel
def _permute(values: np.ndarray, keys: np.ndarray, half: np.uint64, size: np.uint64) -> None:
    """Replace every value by its image, in place.

    A block of values goes through each round of the network together, in vector lanes; values that
    land outside the range go through again.  One value at a time takes ten times as long: the
    processor waits for every product and mispredicts where each walk ends.
    """
    scratch = np.empty((2, _BLOCK), np.uint64)
    outside = np.empty(_BLOCK, np.int64)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        count = len(block)
        for i in range(count):
            outside[i] = i
        while count:
            _encrypt(block, outside[:count], keys, half, scratch[0], scratch[1])
            kept = 0
            for place in outside[:count]:
                outside[kept] = place
                kept += block[place] >= size
            count = kept


@helper
def _encrypt(
    values: np.ndarray,
    places: np.ndarray,
    keys: np.ndarray,
    half: np.uint64,
    left: np.ndarray,
    right: np.ndarray,
) -> None:
    """Apply the Feistel network on 2 * half bits to the values at some places, in place."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    for i in range(len(places)):
        left[i], right[i] = values[places[i]] >> half, values[places[i]] & mask
    for key in keys:
        for i in range(len(places)):
            left[i], right[i] = right[i], left[i] ^ (_mix(right[i] + key) & mask)
    for i in range(len(places)):
        values[places[i]] = (left[i] << half) | right[i]


@helper
def _mix(value: np.uint64) -> np.uint64:
    """Return the finalizer of SplitMix64 (Steele et al. 2014); wraps around 2^64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
