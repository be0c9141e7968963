"""Negative entities, drawn by position: any rank can draw any chunk's negatives.

The draw is a function of (seed, epoch, step, side, chunk), never of the world size: ranks that
share a chunk draw the same candidates, all others draw different ones.  Philox is a counter-based
generator (Salmon et al. 2011), so that jumping to a chunk costs nothing.
"""

from __future__ import annotations

import numpy as np

_PER_COUNTER = 4  # 64-bit words that Philox gives for one counter value
_STREAM = 1  # sets the draws apart from the epoch order, which takes the key (epoch,)


class NegativeSampler:
    """Draws ``count`` entities for every chunk and side, with replacement.

    weights: None for uniform draws, or (N,) non-negative numbers to draw in proportion to.
    """

    def __init__(self, num_entities: int, count: int, seed: int, weights: np.ndarray | None = None):
        self.num_entities, self.count, self.seed = num_entities, count, seed
        self._cumulative = None if weights is None else _cumulative(weights, num_entities)

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
        if self._cumulative is None:
            return (unit * self.num_entities).astype(np.int64)
        ids = np.searchsorted(self._cumulative, unit * self._cumulative[-1], side="right")
        # Rounding may reach the total itself: fall back on the last entity of positive weight.
        return np.minimum(ids, self._last).astype(np.int64)

    @property
    def _last(self) -> int:
        return int(np.searchsorted(self._cumulative, self._cumulative[-1], side="left"))


def _cumulative(weights: np.ndarray, num_entities: int) -> np.ndarray:
    if weights.shape != (num_entities,):
        raise ValueError(f"need one weight an entity, ({num_entities},), got {weights.shape}")
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError("negative-sampling weights must be finite, >= 0 and not all zero")
    return np.cumsum(weights, dtype=np.float64)


def degree_weights(degrees: np.ndarray, power: float) -> np.ndarray:
    """(N,) weights proportional to degree ** power; entities without a triple get none."""
    return np.where(degrees > 0, np.maximum(degrees, 1).astype(np.float64) ** power, 0.0)
