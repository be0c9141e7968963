"""Negative entities, drawn by position: any rank can draw any chunk's negatives.

The draw is a function of (seed, epoch, step, side, chunk), never of the world size: ranks that
share a chunk draw the same candidates, all others draw different ones.  Philox is a counter-based
generator (Salmon et al. 2011), so that jumping to a chunk costs nothing.
"""

from __future__ import annotations

import numpy as np

from kge_torchrec.data.degrees import DegreeDraw

_PER_COUNTER = 4  # 64-bit words that Philox gives for one counter value
_STREAM = 1  # sets the draws apart from the epoch order, which takes the key (epoch,)


class NegativeSampler:
    """Draws ``count`` entities for every chunk and side, with replacement.

    by_degree: draws in proportion to degree; None draws uniformly.
    """

    def __init__(
        self, num_entities: int, count: int, seed: int, by_degree: DegreeDraw | None = None
    ):
        self.num_entities, self.count, self.seed = num_entities, count, seed
        self._by_degree = by_degree

    def draw(self, epoch: int, step: int, side: int, first_chunk: int, chunks: int) -> np.ndarray:
        """(chunks, count) int64 entity ids for the chunks from ``first_chunk`` on."""
        blocks = -(-self.count // _PER_COUNTER)
        seeds = np.random.SeedSequence(self.seed, spawn_key=(epoch, _STREAM))
        key, counter = seeds.generate_state(2, np.uint64), [first_chunk * blocks, step, side, 0]
        bits = np.random.Philox(key=key, counter=counter)
        words = bits.random_raw(chunks * blocks * _PER_COUNTER)
        unit = (words >> np.uint64(11)) * 2.0**-53  # [0, 1), exact
        return self._to_ids(unit.reshape(chunks, blocks * _PER_COUNTER)[:, : self.count])

    def _to_ids(self, unit: np.ndarray) -> np.ndarray:
        if self._by_degree is None:
            return (unit * self.num_entities).astype(np.int64)
        return self._by_degree(unit)
