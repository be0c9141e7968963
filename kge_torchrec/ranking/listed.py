"""Ranks among the candidates that each query has for itself, over a row-sharded entity table.

Every rank scores the candidates that it holds, with the same bits as the exact ranking, and the
counts are summed over the ranks. Ties follow the exact ranking, so a realistic rank is the mean of
the optimistic and the pessimistic one, as in the evaluator of the Open Graph Benchmark.

Shapes: T triples, B queries, m candidates per query, D elements per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.ranking.blocks import SMALLEST, block_height, score_block, scoring
from kge_torchrec.ranking.candidate_files import MISSING, FixedLists
from kge_torchrec.ranking.exact import Counter, RankOptions
from kge_torchrec.ranking.metrics import Ranks

_BOTH_SIDES = RankOptions()


def rank_among_lists(
    scorer: Scorer,
    shard: EntityShard,
    triples: Tensor | np.ndarray,
    lists: FixedLists,
    options: RankOptions = _BOTH_SIDES,
) -> Ranks:
    """Rank the true head and tail of every triple among its listed candidates. Collective.

    A NaN counts against the model, as in ``rank_triples``.

    Args:
        scorer: The scorer.
        shard: The entity rows of this rank.
        triples: (T, 3) int64 head, relation, tail; the same on every rank.
        lists: The candidates.
        options: Which sides are ranked, and in which pieces.
    """
    triples = torch.as_tensor(triples, dtype=torch.int64)
    counter = _ListCounter(scorer, shard, None, options, lists)
    ranks = Ranks({}, {}, lists.label)
    with scoring(scorer):
        for side in options.sides:
            less, equal = counter.count(triples, side)
            ranks.sizes[side] = counter.take_sizes()
            ranks.pessimistic[side] = 1 + ranks.sizes[side] - less
            ranks.optimistic[side] = ranks.pessimistic[side] - equal
    return ranks


@dataclass(frozen=True)
class _ListCounter(Counter):
    """Counts the listed candidates that score below the true answer or tie with it."""

    lists: FixedLists
    _sizes: list[np.ndarray] = field(default_factory=list)

    def take_sizes(self) -> np.ndarray:
        """Return the sizes (T,) of the lists counted since the last call."""
        sizes = np.concatenate(self._sizes)
        self._sizes.clear()
        return sizes

    def _count_batch(
        self,
        queries: Tensor,
        anchor: Tensor,
        target: Tensor,
        side: Side,
        less: Tensor,
        equal: Tensor,
    ) -> None:
        """Add the counts of this rank's candidates to less and equal, both (B,)."""
        for start in range(0, len(queries), SMALLEST):  # a block has the candidates of all of them
            part = slice(start, start + SMALLEST)
            relation = queries[part, 1].to(anchor.device)
            true = score_block(self.scorer, anchor[part], relation, target[part], side).diagonal()
            ids = self._ids(queries[part], side)
            for query, scores in self._scores(ids, anchor[part], relation, side):
                less[part].index_add_(0, query, (scores < true[query]).long())
                equal[part].index_add_(0, query, (scores == true[query]).long())

    def _ids(self, queries: Tensor, side: Side) -> np.ndarray:
        """Return the candidates (B, m) of queries (B, 3), and note how many there are."""
        ids = self.lists.of(side, (queries if side == "tail" else queries.flip(1)).numpy())
        self._sizes.append((ids != MISSING).sum(1))
        return ids

    def _scores(
        self, ids: np.ndarray, anchor: Tensor, relation: Tensor, side: Side
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield queries (P,) and the scores (P,) of their candidates on this rank."""
        first, stop = self.shard.row_range
        query, column = np.nonzero((ids >= first) & (ids < stop))
        rows, place = np.unique(ids[query, column], return_inverse=True)
        height = block_height(len(ids), anchor.device, self.options.block_bytes)
        for start in range(0, len(rows), height):
            here = self._to_device(rows[start : start + height] - first)
            block = score_block(self.scorer, anchor, relation, self.shard.own(here), side)
            inside = (place >= start) & (place < start + height)
            which = self._to_device(query[inside])
            yield which, block[which, self._to_device(place[inside] - start)]

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.shard.device)
