"""Epoch order: a keyed pseudo-random permutation computed position by position.

Every rank computes just its own share, in memory of the batch's size; a stored permutation of 1.4
billion triples would take 10 GiB a rank.  The permutation is a Feistel network (Luby and Rackoff
1988) on the next even power of two, walked until it lands inside the range (Black and Rogaway
2002).  The order is a function of (seed, epoch, position) only, never of the world size.
"""

from __future__ import annotations

import numba
import numpy as np

ROUNDS = 6


class EpochOrder:
    """A bijection of [0, size) onto itself, different for every (seed, epoch)."""

    def __init__(self, size: int, seed: int, epoch: int):
        if size < 1:
            raise ValueError(f"an epoch needs at least one triple, got {size}")
        self.size = size
        self._half = max(1, (int(size - 1).bit_length() + 1) // 2)
        # The spawn key is mixed in apart from the seed, so (0, 1) and (1, 0) share nothing.
        keys = np.random.SeedSequence(seed, spawn_key=(epoch,))
        self._keys = keys.generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """(M,) positions in the epoch -> (M,) int64 indices of triples."""
        out = positions.astype(np.uint64)
        _permute(out, self._keys, np.uint64(self._half), np.uint64(self.size))
        return out.view(np.int64)


# Scalars below stay np.uint64 throughout: numba makes a float of uint64 with a signed integer.
@numba.njit(cache=True, nogil=True)
def _permute(values, keys, half, size):
    """Replaces every value by its image, in place."""
    for i in range(len(values)):
        value = _encrypt(values[i], keys, half)
        while value >= size:
            value = _encrypt(value, keys, half)
        values[i] = value


@numba.njit(cache=True, nogil=True)
def _encrypt(value, keys, half):
    """The Feistel network on 2 * half bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half) | right


@numba.njit(cache=True, nogil=True)
def _mix(value):
    """The finalizer of SplitMix64 (Steele et al. 2014); wraps around 2^64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
