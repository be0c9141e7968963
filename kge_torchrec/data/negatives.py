"""Negative entities, drawn by position: any rank can draw any chunk's negatives.

The draw is a function of (seed, epoch, step, side, chunk), never of the world size: ranks that
share a chunk draw the same candidates, all others draw different ones.  Philox is a counter-based
generator (Salmon et al. 2011), so that jumping to a chunk costs nothing.

Shapes: N entities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.data.store.filter_index import Degrees

if TYPE_CHECKING:
    from kge_torchrec.data.store import TripleStore

_PER_COUNTER = 4  # 64-bit words that Philox gives for one counter value
_STREAM = 1  # sets the draws apart from the epoch order, which takes the key (epoch,)


class NegativeSampler:
    """Draws ``count`` entities for every chunk and side, with replacement.

    draw: makes ids of random numbers; None draws uniformly.
    """

    def __init__(self, num_entities: int, count: int, seed: int, draw: EntityDraw | None = None):
        self.num_entities, self.count, self.seed = num_entities, count, seed
        self._to_ids = draw or UniformDraw(num_entities)
        _check(self._to_ids, num_entities)

    def chance(self, ids: np.ndarray) -> np.ndarray:
        """(...) int64 ids -> (...): the probability of each at one draw."""
        return self._to_ids.chance(ids)

    def draw(self, *place: int) -> np.ndarray:
        """(chunks, count) int64 entity ids: those of ``numbers(*place)``."""
        return self.of(self.numbers(*place))

    def of(self, unit: np.ndarray) -> np.ndarray:
        """The entities of numbers (...) in [0, 1)."""
        return self._to_ids(unit)

    def numbers(
        self,
        epoch: int,
        step: int,
        side: int,
        first_chunk: int,
        chunks: int,
        count: int | None = None,
    ) -> np.ndarray:
        """(chunks, count) numbers in [0, 1), for the chunks from ``first_chunk`` on.

        count: of this side, where it has another.
        """
        count = count or self.count
        blocks = -(-count // _PER_COUNTER)
        seeds = np.random.SeedSequence(self.seed, spawn_key=(epoch, _STREAM))
        key, counter = seeds.generate_state(2, np.uint64), [first_chunk * blocks, step, side, 0]
        bits = np.random.Philox(key=key, counter=counter)
        words = bits.random_raw(chunks * blocks * _PER_COUNTER)
        unit = (words >> np.uint64(11)) * 2.0**-53  # [0, 1), exact
        return unit.reshape(chunks, blocks * _PER_COUNTER)[:, :count]


def _check(draw: EntityDraw, num_entities: int) -> None:
    """Raises ConfigError for a draw that does not keep to what ``EntityDraw`` says of it."""
    ends = [0.0, np.nextafter(1.0, 0.0)]
    some = np.append(np.random.default_rng(0).random(62), ends).reshape(4, 16)
    ids, again = draw(some.copy()), draw(some.T.copy())
    problem = ""
    if not (isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.shape == some.shape):
        problem = "does not give an int64 id for each number, in the same shape"
    elif ids.min() < 0 or ids.max() >= num_entities:
        problem = f"gives ids outside [0, {num_entities})"
    elif not np.array_equal(ids, again.T):
        problem = "gives ids that are no function of their number alone: ranks would not agree"
    if problem:
        raise ConfigError(f"negatives.sampling: {type(draw).__name__} {problem}")


class EntityDraw:
    """Makes entities of random numbers: which ones are drawn as negatives, and how often.

    As the numbers are a function of the position in training alone, so are the entities; on how
    many ranks they are drawn changes nothing.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of this draw: keys of ``negatives`` that it has, others in negatives.options."""

    @classmethod
    def of(cls, store: TripleStore, options: Any) -> EntityDraw:
        """The draw for a graph; by default constructed with both."""
        return cls(store, options)  # type: ignore[call-arg]  # a subclass that takes both

    @classmethod
    def frequency_power(cls, options: Any) -> float | None:
        """The power of an entity's frequency that its chance is in proportion to.

        None, as here, is uniform.  The planner counts with it how many rows a step touches.
        """
        return None

    def __call__(self, unit: np.ndarray) -> np.ndarray:
        """(...) numbers in [0, 1) -> (...) int64 ids, each a function of its number alone."""
        raise NotImplementedError

    def chance(self, ids: np.ndarray) -> np.ndarray:
        """(...) int64 ids -> (...): the probability of each at one draw; for negatives.log_q."""
        raise ConfigError(
            f"negatives.log_q: {type(self).__name__} does not say what it draws how often"
        )


class UniformDraw(EntityDraw):
    """All entities alike."""

    def __init__(self, num_entities: int):
        self.num_entities = num_entities

    @classmethod
    def of(cls, store: TripleStore, options: Any) -> UniformDraw:
        return cls(store.num_entities)

    def __call__(self, unit: np.ndarray) -> np.ndarray:
        return (unit * self.num_entities).astype(np.int64)

    def chance(self, ids: np.ndarray) -> np.ndarray:
        return np.full(ids.shape, 1 / self.num_entities)


STEP = 64  # entities between two sums of weights: one byte for eight entities


class DegreeDraw(EntityDraw):
    """Entities in proportion to degree ** power (Mikolov et al. 2013); unused ones never.

    Holds the sum of weights before every 64th entity; the others are added up again when drawn.
    """

    @dataclass(frozen=True)
    class Options:
        """The weights.

        Args:
            degree_power: Exponent of an entity's degree.
        """

        degree_power: float = 0.75

    @classmethod
    def of(cls, store: TripleStore, options: Options) -> DegreeDraw:
        return cls(store.degrees(), options.degree_power)

    @classmethod
    def frequency_power(cls, options: Options) -> float:
        return options.degree_power

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

    def chance(self, ids: np.ndarray) -> np.ndarray:
        degree = sum(pointers[ids + 1] - pointers[ids] for pointers in self._pointers)
        weight = np.power(degree, self._power, where=degree > 0, out=np.zeros(ids.shape))
        return weight / self._sums[-1]


@numba.njit(cache=True, nogil=True)
def _weight(heads: np.ndarray, tails: np.ndarray, power: float, entity: int) -> float:
    degree = heads[entity + 1] - heads[entity] + tails[entity + 1] - tails[entity]
    return float(degree) ** power if degree else 0.0


@numba.njit(cache=True, nogil=True)
def _add_up(
    heads: np.ndarray, tails: np.ndarray, power: float, step: int, sums: np.ndarray
) -> None:
    """Fills in the sum of weights before every step-th entity, and the total at the end."""
    total = 0.0
    for entity in range(len(heads) - 1):
        if entity % step == 0:
            sums[entity // step] = total
        total += _weight(heads, tails, power, entity)
    sums[-1] = total


@numba.njit(cache=True, nogil=True)
def _draw(
    heads: np.ndarray,
    tails: np.ndarray,
    power: float,
    step: int,
    sums: np.ndarray,
    targets: np.ndarray,
    ids: np.ndarray,
) -> None:
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
