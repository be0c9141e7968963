"""Queries against all entities: what a step asks, and the answers it should get.

Every rank builds the whole global batch, as it scores its own entities for all queries of the step;
only ids are in it, and of the answers only where they lie.

Shapes: N entities, R relations, T triples, E examples an epoch, Q queries of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kge_torchrec.data.ahead import batches_ahead
from kge_torchrec.data.answers import Answers
from kge_torchrec.data.known import KnownTriples
from kge_torchrec.data.order import EpochOrder

_STREAM = 2  # sets these seeds apart from the order, key (epoch,), and the negatives, (epoch, 1)


@dataclass(frozen=True)
class Asked:
    """Queries for one side and their answers."""

    side: str
    anchor: np.ndarray  # (Q,) int64
    relation: np.ndarray  # (Q,) int64
    answers: Answers  # of the Q queries, distinct for a query; it may have none


@dataclass(frozen=True)
class QueryBatch:
    """A whole step, the same on every rank."""

    asked: tuple[Asked, ...]  # one a side, those without queries left out
    seed: int  # of what the model draws in this step

    @property
    def queries(self) -> int:
        """Q of all sides together."""
        return sum(len(asked.anchor) for asked in self.asked)


class Examples(Protocol):
    """What an epoch passes through once."""

    def __len__(self) -> int: ...

    def ask(self, index: np.ndarray) -> list[Asked]:
        """The queries of the examples (E,)."""


class TripleQueries:
    """1vsAll (Lacroix et al. 2018): every triple asks for its own tail and for its own head.

    triples: (T, 3), columns head, relation, tail; memory-mapped is fine.
    """

    def __init__(self, triples: np.ndarray, sides: Sequence[str]):
        self.triples, self.sides = triples, tuple(sides)

    def __len__(self) -> int:
        return len(self.triples)

    def ask(self, index: np.ndarray) -> list[Asked]:
        """One query a triple and side, with one answer."""
        head, relation, tail = np.ascontiguousarray(self.triples[index].T, dtype=np.int64)
        ends = {"tail": (head, tail), "head": (tail, head)}
        return [
            Asked(side, ends[side][0], relation, Answers.single(ends[side][1]))
            for side in reversed(self.sides)
        ]


class DistinctQueries:
    """KvsAll (Dettmers et al. 2018): every distinct (anchor, relation, side) with all its answers.

    Queries and answers are read from the index of the only split of ``known``.
    """

    def __init__(self, known: KnownTriples, sides: Sequence[str]):
        self.known = known
        self._queries = {side: known.queries(side) for side in sides}

    def __len__(self) -> int:
        return sum(map(len, self._queries.values()))

    def ask(self, index: np.ndarray) -> list[Asked]:
        """Example i is the i-th query: those of the first side come first."""
        asked, first = [], 0
        for side, queries in self._queries.items():
            own = index[(index >= first) & (index < first + len(queries))] - first
            first += len(queries)
            asked.append(_answered(self.known, side, *queries.find(own)))
        return asked


class EveryQuery:
    """AllvsAll: every entity with every relation, on every side, answered or not."""

    def __init__(self, known: KnownTriples, sides: Sequence[str]):
        self.known, self.sides = known, tuple(sides)
        self._each_side = known.num_entities * known.num_relations

    def __len__(self) -> int:
        return len(self.sides) * self._each_side

    def ask(self, index: np.ndarray) -> list[Asked]:
        """Example i is anchor i // R, relation i % R, counted anew on every side."""
        sides, pairs = np.divmod(index, self._each_side)
        asked = []
        for position, side in enumerate(self.sides):
            pair = np.divmod(pairs[sides == position], self.known.num_relations)
            asked.append(_answered(self.known, side, *pair))
        return asked


def _answered(known: KnownTriples, side: str, anchor: np.ndarray, relation: np.ndarray) -> Asked:
    return Asked(side, anchor, relation, known.answers(side, anchor, relation))


class QueryBatches:
    """The batches of an epoch, in an order that is a function of (seed, epoch).

    batch_size: examples a step over all ranks.
    ahead: build a few batches ahead in threads; for GPUs, which would wait otherwise.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int = 0, ahead: bool = False):
        if len(examples) == 0:
            raise ValueError("there are no training triples")
        self._examples, self.batch_size, self.seed, self.ahead = examples, batch_size, seed, ahead

    @property
    def examples(self) -> int:
        """E: triples for 1vsAll, else queries."""
        return len(self._examples)

    @property
    def steps_per_epoch(self) -> int:
        """Steps an epoch; the last one may be smaller."""
        return -(-self.examples // self.batch_size)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[QueryBatch]:
        """The batches of an epoch, from ``first_step`` on."""
        order = EpochOrder(self.examples, self.seed, epoch)
        steps = range(first_step, self.steps_per_epoch)
        build = batches_ahead if self.ahead else map
        yield from build(lambda step: self.batch(order, epoch, step), steps)

    def batch(self, order: EpochOrder, epoch: int, step: int) -> QueryBatch:
        """The batch of one step of an epoch."""
        start = step * self.batch_size
        positions = np.arange(start, min(start + self.batch_size, self.examples))
        seeds = np.random.SeedSequence(self.seed, spawn_key=(epoch, _STREAM, step))
        asked = [part for part in self._examples.ask(order(positions)) if len(part.anchor)]
        return QueryBatch(tuple(asked), int(seeds.generate_state(1, np.uint64)[0] >> np.uint64(1)))
