"""Negative entities, drawn by position: any rank can draw any chunk's negatives.

The draw is a function of (seed, epoch, step, side, chunk), never of the world size: ranks that
share a chunk draw the same candidates, all others draw different ones.  Philox is a counter-based
generator (Salmon et al. 2011), so that jumping to a chunk costs nothing.


How often entities occur in triples, without a number of each in memory.

The filter index has the number of rows before each anchor.  Added over both sides these are
cumulative degrees, in files that all processes of a host map together.

Shapes: N entities.
"""

from __future__ import annotations

import numba
import numpy as np

from kge_torchrec.data.filter_index import read_only

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


_CHUNK = 1 << 18  # entities looked at together
STEP = 64  # entities between two sums of weights: one byte for eight entities


class Degrees:
    """How often each of N entities is head or tail of a training triple.

    heads, tails: (N + 1,) int64, how many triples have a head (a tail) below each id; may be
        memory-mapped.
    """

    def __init__(self, heads: np.ndarray, tails: np.ndarray):
        self.pointers = read_only(heads), read_only(tails)

    def __len__(self) -> int:
        return len(self.pointers[0]) - 1

    def between(self, first: int, stop: int) -> np.ndarray:
        """(n,) int64: of the entities from ``first`` to ``stop`` - 1."""
        heads, tails = (np.diff(pointer[first : stop + 1]) for pointer in self.pointers)
        heads += tails
        return heads

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """(N,) int64, all of them."""
        return self.between(0, len(self)).astype(dtype or np.int64, copy=False)

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """The different degrees, ascending, and how many entities have each; int64."""
        degrees, entities = np.empty((2, 0), np.int64)
        for first in range(0, len(self), _CHUNK):
            chunk = self.between(first, min(first + _CHUNK, len(self)))
            found = np.unique(chunk, return_counts=True)
            degrees, slot = np.unique(np.concatenate([degrees, found[0]]), return_inverse=True)
            entities = np.bincount(slot, np.concatenate([entities, found[1]])).astype(np.int64)
        return degrees, entities


class DegreeDraw:
    """Draws entities in proportion to degree ** power; those without a triple never.

    Holds the sum of weights before every 64th entity; the others are added up again when drawn.
    """

    def __init__(self, degrees: Degrees, power: float):
        self._pointers, self._power = degrees.pointers, float(power)
        self._sums = np.empty(-(-len(degrees) // STEP) + 1)
        _add_up(*self._pointers, self._power, STEP, self._sums)
        if not self._sums[-1] > 0:
            raise ValueError("negatives cannot be drawn by degree: no entity is in a triple")

    def __call__(self, unit: np.ndarray) -> np.ndarray:
        """(...) numbers in [0, 1) -> (...) int64 ids."""
        total = self._sums[-1]
        # Rounding may reach the total itself, which no entity lies beyond.
        targets = np.minimum(unit.ravel() * total, np.nextafter(total, 0.0))
        ids = np.empty(len(targets), np.int64)
        _draw(*self._pointers, self._power, STEP, self._sums, targets, ids)
        return ids.reshape(unit.shape)


@numba.njit(cache=True, nogil=True)
def _weight(heads, tails, power, entity):
    degree = heads[entity + 1] - heads[entity] + tails[entity + 1] - tails[entity]
    return float(degree) ** power if degree else 0.0


@numba.njit(cache=True, nogil=True)
def _add_up(heads, tails, power, step, sums):
    """Fills in the sum of weights before every step-th entity, and the total at the end."""
    total = 0.0
    for entity in range(len(heads) - 1):
        if entity % step == 0:
            sums[entity // step] = total
        total += _weight(heads, tails, power, entity)
    sums[-1] = total


@numba.njit(cache=True, nogil=True)
def _draw(heads, tails, power, step, sums, targets, ids):
    """The first entity at which the sum of weights exceeds each target."""
    for i in range(len(targets)):
        block = np.searchsorted(sums, targets[i], side="right") - 1
        entity, total = block * step, sums[block]
        while True:
            total += _weight(heads, tails, power, entity)
            if total > targets[i]:
                break
            entity += 1
        ids[i] = entity
