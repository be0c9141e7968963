"""A keyed permutation that is computed position by position."""

from __future__ import annotations

import numpy as np

from kge_torchrec.kernels.random_streams import permute_array

ROUNDS = 6


class EpochShuffle:
    """A keyed pseudo-random permutation of [0, size), different for every (seed, epoch).

    The permutation is a Feistel network (Luby and Rackoff 1988) on the next even power of two.  It
    is applied until the result lies inside the range (Black and Rogaway 2002).

    Shapes: M positions.
    """

    def __init__(self, size: int, seed: int, epoch: int):
        if size < 1:
            raise ValueError(f"an epoch needs at least one triple, got {size}")
        self.size = size
        self._half = max(1, (int(size - 1).bit_length() + 1) // 2)
        # The spawn key is mixed in apart from the seed, so (0, 1) and (1, 0) share nothing.
        keys = np.random.SeedSequence(seed, spawn_key=(epoch,))
        self._keys = keys.generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the examples (M,) int64 at some positions (M,) of the epoch."""
        out = positions.astype(np.uint64)
        permute_array(out, self._keys, np.uint64(self._half), np.uint64(self.size))
        return out.view(np.int64)
