"""Scores that follow how often train has an answer: a baseline, and a penalty of popular answers.

Baselines know nothing of embeddings. The engine ranks them as it ranks the model: among the same
candidates, with the same filter and the same rule for ties.

Shapes: B queries, n entities of a block, m entities per query.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.ranking.blocks import Queries, Scores
from kge_torchrec.ranking.candidates import Frequencies

FREQUENT, POPULAR, KNN = "most frequent", "most popular", "item-kNN"  # names of baselines


class FrequentScores(Scores):
    """The baseline "most frequent": in how many training triples of the relation the answer is."""

    def __init__(self, shard: EntityShard, frequencies: Frequencies):
        super().__init__(shard)
        self.frequencies = frequencies

    def blocks(self, queries: Queries, block_bytes: int | None) -> Iterator[tuple[int, Tensor]]:
        relations, sizes = queries.relations.unique_consecutive(return_counts=True)
        for first, stop in self._ranges(len(queries.relations), block_bytes):
            counts = self.frequencies.within(queries.side, relations.numpy(), first, stop)
            each = zip(self._tensor(counts).split(1), sizes.tolist(), strict=True)
            yield first, torch.cat([row.expand(size, -1) for row, size in each])

    def of(self, queries: Queries, entities: np.ndarray) -> Tensor:
        relations = np.broadcast_to(queries.relations.numpy()[:, None], entities.shape)
        pairs = relations.ravel(), entities.ravel().clip(0)
        return self._tensor(self.frequencies.of(queries.side, *pairs).reshape(entities.shape))

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

    def of(self, queries: Queries, entities: np.ndarray) -> Tensor:
        return self.scores.of(queries, entities) - super().of(queries, entities)

    def _tensor(self, counts: np.ndarray) -> Tensor:
        return super()._tensor(self.weight * np.log1p(counts))
