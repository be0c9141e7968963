"""Batches of queries, with all entities or with their answers and sampled entities as candidates.

With all entities as candidates, every rank makes the whole batch, since it scores its own entities
for all queries of the step.  With sampled candidates (KvsSample), rank r takes the r-th part of a
step's queries.  All queries of a side share their candidates, and the answers of a query are a
function of (seed, epoch, query), so training does not depend on the world size.

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
    """Queries for one side and their answers."""

    side: Side  # the missing one
    anchor: np.ndarray  # (Q,) int64
    relation: np.ndarray  # (Q,) int64
    answers: Answers  # distinct for each query, which may have none
    weight: np.ndarray | None = None  # (Q,) float32 in the loss
    candidates: np.ndarray | None = None  # (S, 2) ranges of ids, start and stop; None: all

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
    """The queries of a step, or of a micro-batch of it, the same on every rank."""

    queries_by_side: tuple[SideQueries, ...]  # only sides that have queries
    weight: float  # of a query, times its own: 1 / (queries of the step times their mean weight)
    seed: int  # of the model's random numbers

    @property
    def queries(self) -> int:
        """Number of queries of all sides together."""
        return sum(len(side.anchor) for side in self.queries_by_side)


class TripleQueries:
    """Examples of 1vsAll (Lacroix et al. 2018): one query per triple and side.

    ``QueryBatches`` has the two queries of a triple half an epoch apart.  In one step their
    gradients would pull the same rows in the same direction: on FB15k-237 with relation prediction
    an epoch learns less (loss 32.4 instead of 27.7 over the first 100 steps).

    ``triples`` (T, 3) and ``weights`` (T,) in the loss may be memory-mapped.
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

    ``known`` is the index of a single split.  With ``sums_answers``, a query weighs as much as its
    answers together, each of them 1.
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
    """Examples of AllvsAll: every entity with every relation and side, with or without answers.

    ``sizes`` are N and R.
    """

    def __init__(self, known: FilterIndex, sides: Sequence[Side], sizes: tuple[int, int]):
        super().__init__(known, sides)
        self._sizes = sizes

    def _count(self, side: Side) -> int:
        return self._sizes[0] * self._sizes[1]

    def _read(self, side: Side, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, Answers]:
        """Return queries by number, of which i is anchor i // R with relation i % R."""
        anchors, relations = np.divmod(numbers, self._sizes[1])
        return anchors, relations, self.known.answers(side, anchors, relations)


Examples = TripleQueries | DistinctQueries


class QueryBatches(EpochBatches[QueryBatch]):
    """Makes the batches of queries whose candidates are all entities, or all of some types.

    Every rank makes the whole batch.  With ``ends``, the candidates of a query are the entities of
    the types that its relation has on that side.
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
    """

    relation: Tensor  # (Q,) ids
    query: Tensor  # (M,) the query of its side that an answer belongs to, ascending in a side
    known: Tensor  # (Q, K) bool, answers among the candidates of the query's side
    weight: Tensor  # () world size / queries of the step
    queries: tuple[int, ...]  # of each side
    answers: tuple[int, ...]  # of each side


class QuerySampleBatches(EpochBatches[QuerySample]):
    """Makes the batches of distinct queries with sampled candidates (KvsSample).

    ``known`` is the index of the training triples.  The chunk is the whole step.
    """

    def __init__(self, known: FilterIndex, plan: BatchPlan, delivery: Delivery | None = None):
        self.known, self._queries = known, DistinctQueries(known, plan.sides)
        super().__init__(len(self._queries), plan, delivery)

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> QuerySample:
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
