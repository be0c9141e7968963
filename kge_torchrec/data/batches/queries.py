"""Batches of queries: every entity is a candidate, or sampled ones beside all answers (KvsSample).

Where every entity is a candidate, every rank builds the whole global batch, as it scores its own
entities for all queries of the step; only ids are in it, and of the answers only where they lie.
Of KvsSample, rank r takes the r-th part of a step's queries; the entities sampled for a side are
shared by all of them, and which answers are drawn of a query that has too many is a function of
(seed, epoch, query), so what is trained does not depend on the world size.

Shapes: N entities, R relations, T triples, E examples an epoch, Q queries of a step, M answers
after drawing, K sampled entities a side, U unique entities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import SIDES, Side
from kge_torchrec.data.batches.distinct import distinct
from kge_torchrec.data.store.filter_index import Answers, FilterIndex
from kge_torchrec.data.batches.jagged import KeyedJaggedTensor
from kge_torchrec.data.batches.triples import (
    SIDE_CODES,
    Batch,
    EpochBatches,
    Pipelineable,
    as_feature,
)
from kge_torchrec.data.negatives import NegativeSampler
from kge_torchrec.data.batches.order import ROUNDS, draw_distinct
from kge_torchrec.data.weighted_draw import Order, WeightedDraw
from kge_torchrec.data.weights import mean_of

_STREAM = 2  # sets these seeds apart from the order, key (epoch,), and the negatives, (epoch, 1)


@dataclass(frozen=True)
class SideQueries:
    """Queries for one side and their answers."""

    side: Side
    anchor: np.ndarray  # (Q,) int64
    relation: np.ndarray  # (Q,) int64
    answers: Answers  # of the Q queries, distinct for a query; it may have none
    weight: np.ndarray | None = None  # (Q,) float32, in the loss; None weighs all alike


@dataclass
class QueryBatch(Pipelineable):
    """A whole step, or a micro-batch of it, the same on every rank."""

    asked: tuple[SideQueries, ...]  # one a side, those without queries left out
    weight: float  # of a query, times its own if it has one: 1 / (queries of the whole step * mean)
    seed: int  # of what the model draws

    @property
    def queries(self) -> int:
        """Q of all sides together."""
        return sum(len(asked.anchor) for asked in self.asked)


class Examples(Protocol):
    """What an epoch passes through once; each asks the same number of queries, ``queries_each``."""

    queries_each: int
    weights: np.ndarray | None  # (E,) in the loss; None weighs all alike

    def __len__(self) -> int: ...

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """The queries of examples (queries_each, B): row i has those that ask their i-th query."""


class TripleQueries:
    """1vsAll (Lacroix et al. 2018): every triple asks for its own tail and for its own head.

    These are two examples, as in Lacroix et al.: ``QueryBatches`` asks them in different steps.

    triples: (T, 3), columns head, relation, tail; memory-mapped is fine, as for weights (T,).
    """

    def __init__(
        self, triples: np.ndarray, sides: Sequence[Side], weights: np.ndarray | None = None
    ):
        self.triples, self.sides, self.weights = triples, tuple(sides), weights
        self.queries_each = len(self.sides)

    def __len__(self) -> int:
        return len(self.triples)

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """One query a triple and side, with one answer."""
        return [self._ask_side(side, own) for side, own in zip(self.sides, index, strict=True)]

    def _ask_side(self, side: Side, index: np.ndarray) -> SideQueries:
        head, relation, tail = np.ascontiguousarray(self.triples[index].T, dtype=np.int64)
        anchor, answer = (head, tail) if side == "tail" else (tail, head)
        weight = None if self.weights is None else self.weights[index]
        return SideQueries(side, anchor, relation, Answers.single(answer), weight)


class DistinctQueries:
    """KvsAll (Dettmers et al. 2018): every distinct (anchor, relation, side) with all its answers.

    Queries and answers are read from the index of the only split of ``known``.
    """

    queries_each = 1
    weights: np.ndarray | None = None

    def __init__(self, known: FilterIndex, sides: Sequence[Side]):
        self.known = known
        self._queries = {side: known.queries(side) for side in sides}

    def __len__(self) -> int:
        return sum(map(len, self._queries.values()))

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """Example i is the i-th query: those of the first side come first."""
        (index,), asked, first = index, [], 0
        for side, queries in self._queries.items():
            own = index[(index >= first) & (index < first + len(queries))] - first
            first += len(queries)
            asked.append(_answered(self.known, side, *queries.find(own)))
        return asked


class EveryQuery:
    """AllvsAll: every entity with every relation, on every side, answered or not."""

    queries_each = 1
    weights: np.ndarray | None = None

    def __init__(self, known: FilterIndex, sides: Sequence[Side]):
        self.known, self.sides = known, tuple(sides)
        self._each_side = known.num_entities * known.num_relations

    def __len__(self) -> int:
        return len(self.sides) * self._each_side

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """Example i is anchor i // R, relation i % R, counted anew on every side."""
        sides, pairs = np.divmod(index[0], self._each_side)
        asked = []
        for position, side in enumerate(self.sides):
            pair = np.divmod(pairs[sides == position], self.known.num_relations)
            asked.append(_answered(self.known, side, *pair))
        return asked


def _answered(
    known: FilterIndex, side: Side, anchor: np.ndarray, relation: np.ndarray
) -> SideQueries:
    return SideQueries(side, anchor, relation, known.answers(side, anchor, relation))


class QueryBatches(EpochBatches[QueryBatch]):
    """The batches of an epoch, in an order that is a function of (seed, epoch).

    batch_size: examples a step over all ranks.
    ahead: build a few batches ahead in threads; for GPUs, which would wait otherwise.
    accumulation: micro-batches that a step comes in.
    draw: which examples an epoch passes through; None takes each once.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        seed: int = 0,
        ahead: bool = False,
        accumulation: int = 1,
        replay: tuple[int, float] = (0, 1.0),
        draw: WeightedDraw | None = None,
    ):
        self._examples, self._mean_weight = examples, mean_of(examples.weights)
        super().__init__(batch_size, seed, ahead, accumulation, replay, draw)

    @property
    def every(self) -> int:
        """E: triples for 1vsAll, else queries."""
        return len(self._examples)

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> QueryBatch:
        """The batch of one step of an epoch, or a part of it with accumulation; may be empty."""
        first = step * self.batch_size
        size = min(self.batch_size, self.examples - first)
        start, stop = (first + size * i // self.accumulation for i in (part, part + 1))
        asked = self._examples.ask(self._places(order, start, stop))
        seeds = np.random.SeedSequence(self.seed, spawn_key=(epoch, _STREAM, step))
        total = size * self._examples.queries_each * self._mean_weight
        return QueryBatch(
            asked=tuple(of_side for of_side in asked if len(of_side.anchor)),
            weight=1 / total,
            seed=int(seeds.generate_state(part + 1, np.uint64)[part] >> np.uint64(1)),
        )

    def _places(self, order: Order, start: int, stop: int) -> np.ndarray:
        """(queries_each, B) the examples of B positions of an epoch, for each query of its own.

        The two queries of a triple are half an epoch apart.  In one step their gradients pull the
        same rows in the same direction: half as many triples a step, and on FB15k-237 with
        prediction of relations an epoch learns less (loss 32.4 rather than 27.7 over the first
        100 steps).
        """
        each = self._examples.queries_each
        lag = self.examples * np.arange(each)[:, None] // each
        return order(((np.arange(start, stop) + lag) % self.examples).ravel()).reshape(each, -1)


_ANSWER_STREAM = 3  # sets draws of answers apart from the order, the negatives and ``queries``


@dataclass
class QuerySample(Pipelineable):
    """One rank's share of a step; everything side after side."""

    ids: KeyedJaggedTensor  # the U unique entity ids, ascending, unless ``deduplicated`` is False
    entities: Tensor  # (Q + M + sides K) positions in ids: anchors, answers, sampled entities
    relation: Tensor  # (Q,)
    query: Tensor  # (M,) which query of its side an answer belongs to, ascending within a side
    known: Tensor  # (Q, K) bool: answers among the entities sampled for the query's side
    weight: Tensor  # () float32: world size / queries of the global batch
    queries: tuple[int, ...]  # of each side
    answers: tuple[int, ...]  # of each side
    # False: ids holds every entity of ``entities``, in that order, duplicates included
    deduplicated: bool = True


SampledBatch = Batch | QuerySample  # whose rows are looked up


class QuerySampleBuilder(EpochBatches[QuerySample]):
    """Builds batch (epoch, step) for one rank.

    batch_size: distinct queries a step over all ranks.
    max_answers: of a query with more, each epoch draws this many, of which alone its loss hears;
        the others are no candidates of it, so they are known where they are sampled.  0: no limit.
    The others as for BatchBuilder.
    """

    def __init__(
        self,
        known: FilterIndex,
        batch_size: int,
        sampler: NegativeSampler,
        *,
        sides: Sequence[Side] = SIDES,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        ahead: bool = False,
        deduplicate: bool = True,
        bags: int = 1,
        accumulation: int = 1,
        max_answers: int = 0,
    ):
        self._queries = DistinctQueries(known, sides)
        super().__init__(batch_size, seed, ahead, accumulation)
        self.known, self.sampler, self.max_answers = known, sampler, max_answers
        self.rank, self.world_size = rank, world_size
        self.deduplicate, self.bags = deduplicate, bags

    @property
    def every(self) -> int:
        """The distinct queries."""
        return len(self._queries)

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> QuerySample:
        """The batch of one step of an epoch, or a part of it with accumulation; may be empty."""
        first = step * self.batch_size
        size = min(self.batch_size, self.examples - first)
        number, parts = self.rank * self.accumulation + part, self.world_size * self.accumulation
        start, stop = (size * i // parts for i in (number, number + 1))
        asked = self._queries.ask(order(np.arange(first + start, first + stop))[None])
        sampled = [
            self.sampler.draw(epoch, step, SIDE_CODES[of_side.side], 0, 1)[0] for of_side in asked
        ]
        known = [
            self.known.contains(of_side.side, of_side.anchor, of_side.relation, drawn)
            for of_side, drawn in zip(asked, sampled, strict=True)
        ]
        query, answer = zip(*(self._answers(of_side, epoch) for of_side in asked), strict=True)
        ids = np.concatenate([*(a.anchor for a in asked), *answer, *sampled])
        unique, entities = distinct(ids)
        return QuerySample(
            ids=as_feature(torch.from_numpy(unique if self.deduplicate else ids), self.bags),
            entities=torch.from_numpy(entities),
            relation=torch.from_numpy(np.concatenate([a.relation for a in asked])),
            query=torch.from_numpy(np.concatenate(query)),
            known=torch.from_numpy(np.concatenate(known)),
            weight=torch.tensor(self.world_size / size),
            queries=tuple(len(a.anchor) for a in asked),
            answers=tuple(map(len, answer)),
            deduplicated=self.deduplicate,
        )

    def _answers(self, asked: SideQueries, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Query (M,), ascending, and entity (M,) of one side's answers, no more than allowed."""
        counts = asked.answers.counts
        if not self.max_answers or counts.max(initial=0) <= self.max_answers:
            return asked.answers.all()
        spawn_key = (epoch, _ANSWER_STREAM, SIDE_CODES[asked.side])
        keys = np.random.SeedSequence(self.seed, spawn_key=spawn_key)
        numbers = asked.anchor * self.known.num_relations + asked.relation
        position = draw_distinct(
            counts, self.max_answers, numbers, keys.generate_state(ROUNDS, np.uint64)
        )
        query = np.repeat(np.arange(len(counts)), np.minimum(counts, self.max_answers))
        return query, asked.answers.at(query, position)
