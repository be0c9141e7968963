"""Scores that follow how often train has an answer: a baseline, and a penalty of popular answers.

Baselines know nothing of embeddings. The engine ranks them as it ranks the model: among the same
candidates, with the same filter and the same rule for ties.

Shapes: B queries, n entities of a block, T triples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import answer_column
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.ranking.blocks import Queries, Scores, by_relation
from kge_torchrec.ranking.candidates import Frequencies
from kge_torchrec.ranking.fixed import MISSING, FixedLists
from kge_torchrec.ranking.ranks import Ranks

FREQUENT, POPULAR, KNN = "most frequent", "most popular", "item-kNN"  # names of baselines
LISTS = 512  # fixed lists at once


class FrequentScores(Scores):
    """The baseline "most frequent": in how many training triples of the relation the answer is."""

    def __init__(self, shard: EntityShard, frequencies: Frequencies):
        super().__init__(shard)
        self.frequencies = frequencies

    def blocks(self, queries: Queries, block_bytes: int | None) -> Iterator[tuple[int, Tensor]]:
        count = len(queries.relations)
        for first, stop in self._ranges(count, block_bytes):
            scores = torch.empty(count, stop - first, device=self.shard.device)
            for relation, rows in by_relation(scores, queries.relations):
                counts = self.frequencies.within(queries.side, relation, first, stop)
                rows[:] = self._tensor(counts)
            yield first, scores

    def of(self, triples: Tensor, side: Side) -> Tensor:
        relations, answers = triples[:, [1, answer_column(side)]].T.numpy()
        return self._tensor(self.frequencies.of(side, relations, answers))

    def _tensor(self, counts: np.ndarray) -> Tensor:
        return torch.from_numpy(counts.astype(np.float32)).to(self.shard.device)


class NovelScores(FrequentScores):
    """Other scores minus ``weight * log(1 + n)``, where n is the score of ``FrequentScores``.

    So rare and new answers move up. Those that are in no training triple keep their score. A weight
    below 0 moves popular answers up.
    """

    def __init__(self, scores: Scores, frequencies: Frequencies, weight: float):
        super().__init__(scores.shard, frequencies)
        self.scores, self.weight = scores, weight

    def blocks(self, queries: Queries, block_bytes: int | None) -> Iterator[tuple[int, Tensor]]:
        penalties = super().blocks(queries, block_bytes)
        blocks = zip(self.scores.blocks(queries, block_bytes), penalties, strict=True)
        for (first, scores), (_, penalty) in blocks:
            yield first, scores - penalty

    def of(self, triples: Tensor, side: Side) -> Tensor:
        return self.scores.of(triples, side) - super().of(triples, side)

    def _tensor(self, counts: np.ndarray) -> Tensor:
        return super()._tensor(self.weight * np.log1p(counts))


def frequent_among_lists(frequencies: Frequencies, triples: np.ndarray, lists: FixedLists) -> Ranks:
    """Rank triples (T, 3) by ``FrequentScores`` among fixed lists, as ``rank_among_lists`` does."""
    ranks = Ranks({}, {})
    for side in SIDES:
        pessimistic, optimistic = np.empty((2, len(triples)), np.int64)
        own = frequencies.of(side, triples[:, 1], triples[:, answer_column(side)])
        for first in range(0, len(triples), LISTS):
            part = slice(first, first + LISTS)
            ids = lists.of(side, triples[part])
            relations = np.broadcast_to(triples[part, 1:2], ids.shape)
            counts = frequencies.of(side, relations.ravel(), np.maximum(ids, 0).ravel())
            counts = np.where(ids == MISSING, -1, counts.reshape(ids.shape))
            optimistic[part] = 1 + (counts > own[part, None]).sum(1)
            pessimistic[part] = 1 + (counts >= own[part, None]).sum(1)
        ranks.optimistic[side], ranks.pessimistic[side] = optimistic, pessimistic
    return ranks
