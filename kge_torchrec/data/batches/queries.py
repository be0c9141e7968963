"""Batches of queries, with all entities or with their answers and sampled entities as candidates.

With all entities as candidates, every rank makes the whole batch, since it scores its own entities
for all queries of the step.  Such a batch has only ids and the positions of the answers.  With
sampled candidates (KvsSample), rank r takes the r-th part of a step's queries.  All queries of a
side share their candidates, and the answers of a query are a function of (seed, epoch, query), so
training does not depend on the world size.

Shapes: N entities, R relations, T triples, E examples per epoch, Q queries per step, M answers,
K candidates per side, U unique entities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import SIDES, Side
from kge_torchrec.data.batches import (
    BatchPlan,
    Delivery,
    EpochBatches,
    Pipelineable,
    SampledBatch,
    lookup_of,
    mean_weight,
)
from kge_torchrec.data.batches.order import ROUNDS, Order, sample_distinct
from kge_torchrec.data.negatives import Chunks, random_numbers
from kge_torchrec.data.store.filter_index import (
    Answers,
    FilterIndex,
    anchors_of,
    relations_of,
)
from kge_torchrec.data.types import Ends

# Seed streams, distinct from those of the order, (epoch,), and of the candidates, (epoch, 1).
_MODEL_STREAM, _ANSWER_STREAM = 2, 3


@dataclass(frozen=True)
class SideQueries:
    """Queries for one side and their answers.

    Args:
        side: The missing side.
        anchor, relation: (Q,) int64 ids.
        answers: Answers of the Q queries, distinct for each query, which may have none.
        weight: (Q,) float32 in the loss; None weighs all alike.
        candidates: (S, 2) int64, the candidates of all Q queries as ranges of ids, start and stop;
            None for all entities.
    """

    side: Side
    anchor: np.ndarray
    relation: np.ndarray
    answers: Answers
    weight: np.ndarray | None = None
    candidates: np.ndarray | None = None

    def only(self, chosen: np.ndarray) -> SideQueries:
        """Return the chosen queries, (Q,) bool, with their answers."""
        number = np.cumsum(chosen) - 1
        parts = []
        for part in self.answers.parts:
            own = chosen[part.query]
            query, starts, stops = number[part.query[own]], part.starts[own], part.stops[own]
            parts.append(part._replace(query=query, starts=starts, stops=stops))
        return replace(
            self,
            anchor=self.anchor[chosen],
            relation=self.relation[chosen],
            answers=Answers(int(chosen.sum()), parts),
            weight=None if self.weight is None else self.weight[chosen],
        )


@dataclass
class QueryBatch(Pipelineable):
    """The queries of a step, or of a micro-batch of it, the same on every rank.

    Args:
        weight: Weight of a query in the loss, times its own if it has one: 1 / (queries of the step
            times their mean weight).
        seed: Seed of the model's random numbers.
    """

    queries_by_side: tuple[SideQueries, ...]  # only sides that have queries
    weight: float
    seed: int

    @property
    def queries(self) -> int:
        """Number of queries of all sides together."""
        return sum(len(side.anchor) for side in self.queries_by_side)


class Examples(Protocol):
    """The examples of an epoch, triples or queries; an epoch uses each of them once.

    Attributes:
        queries_each: Queries per example.
        weights: (E,) in the loss; None weighs all alike.
    """

    queries_each: int
    weights: np.ndarray | None

    def __len__(self) -> int: ...

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """Return queries; row i of index (queries_each, B) has examples for their i-th query."""


class TripleQueries:
    """Examples of 1vsAll (Lacroix et al. 2018): one query per triple and side.

    As in Lacroix et al., the two queries of a triple are two examples: ``QueryBatches`` puts them
    in different steps.

    Args:
        triples: (T, 3), columns head, relation, tail; may be memory-mapped.
        sides: The sides that are queried.
        weights: (T,) in the loss; may be memory-mapped.
    """

    def __init__(
        self, triples: np.ndarray, sides: Sequence[Side], weights: np.ndarray | None = None
    ):
        self.triples, self.sides, self.weights = triples, tuple(sides), weights
        self.queries_each = len(self.sides)

    def __len__(self) -> int:
        return len(self.triples)

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """Return one query per triple and side, with one answer."""
        parts = []
        for side, rows in zip(self.sides, index, strict=True):
            head, relation, tail = np.ascontiguousarray(self.triples[rows].T, dtype=np.int64)
            anchor, answer = (head, tail) if side == "tail" else (tail, head)
            weight = None if self.weights is None else self.weights[rows]
            parts.append(SideQueries(side, anchor, relation, Answers.single(answer), weight))
        return parts


class DistinctQueries:
    """Examples of KvsAll (Dettmers et al. 2018): distinct (anchor, relation, side), all answers.

    Args:
        known: Index of a single split, from which queries and answers are read.
        sides: The sides that are queried.
        sums_answers: Whether a query weighs as much as its answers together, each of them 1.
    """

    queries_each = 1
    weights: np.ndarray | None = None

    def __init__(self, known: FilterIndex, sides: Sequence[Side], sums_answers: bool = False):
        self.known, self._sums_answers = known, sums_answers
        self._counts = {side: self._count(side) for side in sides}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def _count(self, side: Side) -> int:
        """Return Q, the number of queries of a side."""
        return len(self.known.side_index(side).queries)

    def _read(self, side: Side, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, Answers]:
        """Return anchors (B,), relations (B,) and answers of queries by number in [0, Q)."""
        index = self.known.side_index(side)
        keys = index.queries[numbers]
        return anchors_of(keys), relations_of(keys), index.answers_to(numbers)

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """Return queries; example i is the i-th query, those of the first side first."""
        (index,), parts, first = index, [], 0
        for side, count in self._counts.items():
            own = index[(index >= first) & (index < first + count)] - first
            first += count
            anchor, relation, answers = self._read(side, own)
            weight = answers.counts.astype(np.float32) if self._sums_answers else None
            parts.append(SideQueries(side, anchor, relation, answers, weight))
        return parts


class EveryQuery(DistinctQueries):
    """Examples of AllvsAll: every entity with every relation and side, with or without answers."""

    def _count(self, side: Side) -> int:
        return self.known.num_entities * self.known.num_relations

    def _read(self, side: Side, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, Answers]:
        """Return queries by number, of which i is anchor i // R with relation i % R."""
        anchors, relations = np.divmod(numbers, self.known.num_relations)
        return anchors, relations, self.known.answers(side, anchors, relations)


class AmongTypes:
    """The queries of other examples, with entities of the types of their answers as candidates.

    Args:
        examples: The examples.
        ends: The types at the ends of each relation.
    """

    def __init__(self, examples: Examples, ends: Ends):
        self._examples, self._ends = examples, ends
        self.queries_each, self.weights = examples.queries_each, examples.weights

    def __len__(self) -> int:
        return len(self._examples)

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """Return the queries in groups that have the same candidates."""
        groups = []
        for queries in self._examples.ask(index):
            kinds, kind = self._ends.kinds(queries.side, queries.relation)
            for place, candidates in enumerate(map(self._ends.ranges, kinds)):
                groups.append(replace(queries.only(kind == place), candidates=candidates))
        return groups


class QueryBatches(EpochBatches[QueryBatch]):
    """Make the batches of queries whose candidates are all entities.

    Args:
        examples: The examples of an epoch.
        plan: The contents of the batches.
        delivery: Only ``ahead`` matters, since every rank makes the whole batch.
    """

    def __init__(self, examples: Examples, plan: BatchPlan, delivery: Delivery | None = None):
        super().__init__(len(examples), plan, delivery)
        self._examples, self._mean_weight = examples, mean_weight(examples.weights)

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> QueryBatch:
        """Return the batch of a step, or micro-batch ``part`` of it; it may be empty."""
        first, size = self.positions(epoch, step)
        start, stop = (first + size * i // self.plan.accumulation for i in (part, part + 1))
        sides = self._examples.ask(self._places(order, start, stop))
        seeds = np.random.SeedSequence(self.plan.seed, spawn_key=(epoch, _MODEL_STREAM, step))
        total = size * self._examples.queries_each * self._mean_weight
        return QueryBatch(
            queries_by_side=tuple(side for side in sides if len(side.anchor)),
            weight=1 / total,
            seed=int(seeds.generate_state(part + 1, np.uint64)[part] >> np.uint64(1)),
        )

    def _places(self, order: Order, start: int, stop: int) -> np.ndarray:
        """Return the examples (queries_each, B) of B positions: row i for their i-th query.

        The two queries of a triple are half an epoch apart.  In one step their gradients would pull
        the same rows in the same direction, with half as many triples per step: on FB15k-237 with
        relation prediction an epoch learns less (loss 32.4 instead of 27.7 over the first 100
        steps).
        """
        count = self._examples.queries_each
        lag = self.examples * np.arange(count)[:, None] // count
        return order(((np.arange(start, stop) + lag) % self.examples).ravel()).reshape(count, -1)


@dataclass
class QuerySample(SampledBatch):
    """One rank's share of a step of queries; each part has the first side, then the second.

    The entities are Q + M + sides K: anchors, answers, candidates.

    Args:
        relation: (Q,) ids.
        query: (M,) which query of its side an answer belongs to, ascending within a side.
        known: (Q, K) bool, answers among the candidates of the query's side.
        weight: () float32, world size / queries of the step.
        queries, answers: Numbers of each side.
    """

    relation: Tensor
    query: Tensor
    known: Tensor
    weight: Tensor
    queries: tuple[int, ...]
    answers: tuple[int, ...]


class QuerySampleBatches(EpochBatches[QuerySample]):
    """Make the batches of distinct queries with sampled candidates (KvsSample).

    Args:
        known: Index of the training triples, from which queries and answers are read.
        plan: The contents of the batches, with ``candidates``; their chunk is the whole step.
        delivery: This rank's share.
    """

    def __init__(self, known: FilterIndex, plan: BatchPlan, delivery: Delivery | None = None):
        self.known, self._queries = known, DistinctQueries(known, plan.sides)
        super().__init__(len(self._queries), plan, delivery)

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> QuerySample:
        """Return the batch of a step, or micro-batch ``part`` of it; it may be empty."""
        first, size = self.positions(epoch, step)
        number, parts = self._part(part)
        start, stop = (first + size * i // parts for i in (number, number + 1))
        sides = self._queries.ask(order(np.arange(start, stop))[None])
        sampled = [self._sampled(epoch, step, side.side) for side in sides]
        known = [
            self.known.contains(side.side, side.anchor, side.relation, candidates)
            for side, candidates in zip(sides, sampled, strict=True)
        ]
        query, answer = zip(*(self._answers(side, epoch) for side in sides), strict=True)
        every = np.concatenate([*(side.anchor for side in sides), *answer, *sampled])
        return QuerySample(
            **lookup_of(torch.from_numpy(every), self.plan.features, self.delivery),
            relation=torch.from_numpy(np.concatenate([side.relation for side in sides])),
            query=torch.from_numpy(np.concatenate(query)),
            known=torch.from_numpy(np.concatenate(known)),
            weight=torch.tensor(self.delivery.world_size / size),
            queries=tuple(len(side.anchor) for side in sides),
            answers=tuple(map(len, answer)),
        )

    def _sampled(self, epoch: int, step: int, side: Side) -> np.ndarray:
        """Return the candidates (K,) that all queries of a side share."""
        candidates = self.plan.candidates
        assert candidates is not None
        place = epoch, step, side
        numbers = random_numbers(self.plan.seed, place, range(1), candidates.numbers(side))
        return candidates.sampler.sample(Chunks(side, numbers, _no_triples))[0].numpy()

    def _answers(self, queries: SideQueries, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return query (M,), ascending, and entity (M,) of one side's answers, up to the limit."""
        counts, limit = queries.answers.counts, self.plan.max_answers
        if not limit or counts.max(initial=0) <= limit:
            return queries.answers.all()
        spawn_key = (epoch, _ANSWER_STREAM, SIDES.index(queries.side))
        keys = np.random.SeedSequence(self.plan.seed, spawn_key=spawn_key)
        numbers = queries.anchor * self.known.num_relations + queries.relation
        position = sample_distinct(counts, limit, numbers, keys.generate_state(ROUNDS, np.uint64))
        query = np.repeat(np.arange(len(counts)), np.minimum(counts, limit))
        return query, queries.answers.at(query, position)


def _no_triples() -> Tensor:
    raise ValueError(
        "queries of a batch share their candidates, so samplers get no triples; use a "
        "sampler that reads none"
    )
