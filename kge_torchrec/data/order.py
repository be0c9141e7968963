"""Epoch order: a keyed pseudo-random permutation computed position by position.

Every rank computes just its own share, in memory of the batch's size; a stored permutation of 1.4
billion triples would take 10 GiB a rank.  The permutation is a Feistel network (Luby and Rackoff
1988) on the next even power of two, walked until it lands inside the range (Black and Rogaway
2002).  The order is a function of (seed, epoch, position) only, never of the world size.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6


class EpochOrder:
    """A bijection of [0, size) onto itself, different for every (seed, epoch)."""

    def __init__(self, size: int, seed: int, epoch: int):
        if size < 1:
            raise ValueError(f"an epoch needs at least one triple, got {size}")
        self.size = size
        half = max(1, (int(size - 1).bit_length() + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        # SeedSequence mixes its words, so (0, 1) and (1, 0) share nothing.
        self._keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """(M,) positions in the epoch -> (M,) int64 indices of triples."""
        out = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(out >= self.size)
        while outside.size:
            out[outside] = self._encrypt(out[outside])
            outside = outside[out[outside] >= self.size]
        return out.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014); wraps around 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
