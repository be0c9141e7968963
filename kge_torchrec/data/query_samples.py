"""KvsSample: distinct queries with all their answers, against those and a few sampled entities.

Rank r takes the r-th part of a step's queries; the entities sampled for a side are shared by all of
them, and which answers are drawn of a query that has too many is a function of (seed, epoch,
query), so what is trained does not depend on the world size.

Shapes: Q queries, M answers after drawing, K sampled entities a side, U unique entities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from kge_torchrec.data.batches import SIDE_CODES, as_feature
from kge_torchrec.data.epochs import EpochBatches
from kge_torchrec.data.known import KnownTriples
from kge_torchrec.data.movable import Movable
from kge_torchrec.data.negatives import NegativeSampler
from kge_torchrec.data.order import ROUNDS, EpochOrder, draw_distinct
from kge_torchrec.data.queries import Asked, DistinctQueries

_STREAM = 3  # sets draws of answers apart from the order, the negatives and ``queries``


@dataclass
class QuerySample(Movable):
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


class QuerySampleBuilder(EpochBatches[QuerySample]):
    """Builds batch (epoch, step) for one rank.

    batch_size: distinct queries a step over all ranks.
    max_answers: of a query with more, each epoch draws this many, of which alone its loss hears;
        the others are no candidates of it, so they are known where they are sampled.  0: no limit.
    The others as for BatchBuilder.
    """

    def __init__(
        self,
        known: KnownTriples,
        batch_size: int,
        sampler: NegativeSampler,
        *,
        sides: Sequence[str] = ("head", "tail"),
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
    def examples(self) -> int:
        """What an epoch passes through: the distinct queries."""
        return len(self._queries)

    def batch(self, order: EpochOrder, epoch: int, step: int, part: int = 0) -> QuerySample:
        """The batch of one step of an epoch, or a part of it with accumulation; may be empty."""
        first = step * self.batch_size
        size = min(self.batch_size, self.examples - first)
        number, parts = self.rank * self.accumulation + part, self.world_size * self.accumulation
        start, stop = (size * i // parts for i in (number, number + 1))
        asked = self._queries.ask(order(np.arange(first + start, first + stop)))
        sampled = [
            self.sampler.draw(epoch, step, SIDE_CODES[of_side.side], 0, 1)[0] for of_side in asked
        ]
        known = [
            self.known.contains(of_side.side, of_side.anchor, of_side.relation, drawn)
            for of_side, drawn in zip(asked, sampled, strict=True)
        ]
        query, answer = zip(*(self._answers(of_side, epoch) for of_side in asked), strict=True)
        ids = [*(a.anchor for a in asked), *answer, *sampled]
        every = torch.from_numpy(np.concatenate(ids))
        unique, entities = torch.unique(every, return_inverse=True)
        return QuerySample(
            ids=as_feature(unique if self.deduplicate else every, self.bags),
            entities=entities,
            relation=torch.from_numpy(np.concatenate([a.relation for a in asked])),
            query=torch.from_numpy(np.concatenate(query)),
            known=torch.from_numpy(np.concatenate(known)),
            weight=torch.tensor(self.world_size / size),
            queries=tuple(len(a.anchor) for a in asked),
            answers=tuple(map(len, answer)),
            deduplicated=self.deduplicate,
        )

    def _answers(self, asked: Asked, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Query (M,), ascending, and entity (M,) of one side's answers, no more than allowed."""
        counts = asked.answers.counts
        if not self.max_answers or counts.max(initial=0) <= self.max_answers:
            return asked.answers.all()
        spawn_key = (epoch, _STREAM, SIDE_CODES[asked.side])
        keys = np.random.SeedSequence(self.seed, spawn_key=spawn_key)
        numbers = asked.anchor * self.known.num_relations + asked.relation
        position = draw_distinct(
            counts, self.max_answers, numbers, keys.generate_state(ROUNDS, np.uint64)
        )
        query = np.repeat(np.arange(len(counts)), np.minimum(counts, self.max_answers))
        return query, asked.answers.at(query, position)
