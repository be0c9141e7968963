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
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import SIDES, Side
from kge_torchrec.data.batches import (
    BatchPlan,
    Delivery,
    EpochBatches,
    Order,
    Pipelineable,
    SampledBatch,
    lookup_of,
    mean_weight,
)
from kge_torchrec.data.negatives import Chunks, random_numbers
from kge_torchrec.data.store.filter_index import Answers, FilterIndex, anchors_of, relations_of
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

    def among_types(self, ends: Ends) -> list[SideQueries]:
        """Return the queries in groups by the types of their answers, which are the candidates."""
        groups = []
        kinds, kind = ends.kinds(self.side, self.relation)
        for number, types in enumerate(kinds):
            own = np.flatnonzero(kind == number)
            weight = None if self.weight is None else self.weight[own]
            ids, answers = (self.anchor[own], self.relation[own]), self.answers.of(own)
            groups.append(SideQueries(self.side, *ids, answers, weight, ends.ranges(types)))
        return groups


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


class TripleQueries:
    """Examples of 1vsAll (Lacroix et al. 2018): one query per triple and side.

    As in Lacroix et al., the two queries of a triple are two examples.  ``QueryBatches`` has them
    half an epoch apart.  In one step their gradients would pull the same rows in the same
    direction, with half as many triples per step: on FB15k-237 with relation prediction an epoch
    learns less (loss 32.4 instead of 27.7 over the first 100 steps).

    Args:
        triples: (T, 3), columns head, relation, tail; may be memory-mapped.
        sides: The sides that are queried.
        weights: (T,) in the loss; may be memory-mapped.
    """

    def __init__(
        self, triples: np.ndarray, sides: Sequence[Side], weights: np.ndarray | None = None
    ):
        self.triples, self.sides, self.weights = triples, tuple(sides), weights
        self.queries_each = len(self.sides)  # queries of an example

    def __len__(self) -> int:
        return len(self.triples)

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """Return queries; row i of index (sides, B) has the triples of the i-th side's queries."""
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
        self.known, self.sides, self._sums_answers = known, sides, sums_answers

    def __len__(self) -> int:
        return sum(map(self._count, self.sides))

    def _count(self, side: Side) -> int:
        """Return Q, the number of queries of a side."""
        return len(self.known.side_index(side).queries)

    def _read(self, side: Side, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, Answers]:
        """Return anchors (B,), relations (B,) and answers of queries by number in [0, Q)."""
        index = self.known.side_index(side)
        keys = index.queries[numbers]
        return anchors_of(keys), relations_of(keys), index.answers_to(numbers)

    def ask(self, index: np.ndarray) -> list[SideQueries]:
        """Return queries by number (1, B); those of the first side come first."""
        (numbers,), parts = index, []
        for side in self.sides:
            count = self._count(side)
            own = numbers[(numbers >= 0) & (numbers < count)]
            numbers = numbers - count
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


Examples = TripleQueries | DistinctQueries


class QueryBatches(EpochBatches[QueryBatch]):
    """Make the batches of queries whose candidates are all entities, or all of some types.

    Args:
        examples: The examples of an epoch, each of which is used once.
        plan: The contents of the batches.
        delivery: Only ``ahead`` matters, since every rank makes the whole batch.
        ends: The types at the ends of relations, if the candidates of a query are the entities of
            the types of its answers; None for all entities.
    """

    def __init__(
        self,
        examples: Examples,
        plan: BatchPlan,
        delivery: Delivery | None = None,
        ends: Ends | None = None,
    ):
        super().__init__(len(examples), plan, delivery)
        self._examples, self._mean_weight = examples, mean_weight(examples.weights)
        self._ends = ends

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> QueryBatch:
        """Return the batch of a step, or micro-batch ``part`` of it; it may be empty."""
        first, size = self.positions(epoch, step)
        start, stop = (first + size * i // self.plan.accumulation for i in (part, part + 1))
        count = self._examples.queries_each
        lag = self.examples * np.arange(count)[:, None] // count
        places = (np.arange(start, stop) + lag) % self.examples
        sides = self._examples.ask(order(places.ravel()).reshape(places.shape))
        if self._ends is not None:
            sides = [group for side in sides for group in side.among_types(self._ends)]
        seeds = np.random.SeedSequence(self.plan.seed, spawn_key=(epoch, _MODEL_STREAM, step))
        return QueryBatch(
            queries_by_side=tuple(side for side in sides if len(side.anchor)),
            weight=1 / (size * count * self._mean_weight),
            seed=int(seeds.generate_state(part + 1, np.uint64)[part] >> np.uint64(1)),
        )


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
        plan: The contents of the batches, with a ``sampler``; the chunk is the whole step.
        delivery: This rank's share.
    """

    def __init__(self, known: FilterIndex, plan: BatchPlan, delivery: Delivery | None = None):
        self.known, self._queries = known, DistinctQueries(known, plan.sides)
        super().__init__(len(self._queries), plan, delivery)

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> QuerySample:
        """Return the batch of a step, or micro-batch ``part`` of it; it may be empty."""
        first, size = self.positions(epoch, step)
        world, count = self.delivery.world_size, self.plan.accumulation
        number = self.delivery.rank * count + part
        start, stop = (first + size * i // (world * count) for i in (number, number + 1))
        sides = self._queries.ask(order(np.arange(start, stop))[None])
        sampler, sampled, known, answers = self.plan.sampler, [], [], []
        assert sampler is not None
        for side in sides:
            place, count = (epoch, step, side.side), self.plan.counts[side.side]
            numbers = random_numbers(self.plan.seed, place, range(1), count)
            sampled += [sampler.sample(Chunks(side.side, numbers))[0].numpy()]
            ids = side.side, side.anchor, side.relation, sampled[-1]
            known.append(self.known.contains(*ids))
            answers.append(self._answers(side, epoch))
        query, answer = zip(*answers, strict=True)
        every = np.concatenate([*(side.anchor for side in sides), *answer, *sampled])
        return QuerySample(
            **lookup_of(torch.from_numpy(every), self.plan.features, self.delivery),
            relation=torch.from_numpy(np.concatenate([side.relation for side in sides])),
            query=torch.from_numpy(np.concatenate(query)),
            known=torch.from_numpy(np.concatenate(known)),
            weight=torch.tensor(world / size),
            queries=tuple(len(side.anchor) for side in sides),
            answers=tuple(map(len, answer)),
        )

    def _answers(self, queries: SideQueries, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return query (M,), ascending, and entity (M,) of one side's answers, up to the limit."""
        counts, limit = queries.answers.counts, self.plan.max_answers
        if not limit or counts.max(initial=0) <= limit:
            return queries.answers.all()
        (part,) = queries.answers.parts
        answers = []
        for i, count in enumerate(counts.tolist()):
            place = np.arange(count)
            if count > limit:
                of_query = SIDES.index(queries.side), queries.anchor[i], queries.relation[i]
                random = np.random.default_rng([self.plan.seed, epoch, _ANSWER_STREAM, *of_query])
                place = random.choice(count, limit, replace=False)
            answers.append(part.ids[part.starts[i] + place])
        query = np.repeat(np.arange(len(counts)), np.minimum(counts, limit))
        return query, np.concatenate(answers).astype(np.int64)
