"""Exact filtered ranking over an entity table that is sharded by rows.

Every rank scores its own rows for the same queries. It counts how many candidates score below the
true answer and how many tie with it. The counts are summed over the ranks once per side. Memory
holds one block of scores, never a T x N matrix.

Comparisons with NaN are false, so a NaN is counted neither as less nor as equal. It therefore
counts as a better candidate, against the model.

Shapes: T triples, B queries per batch, n rows of a block, N entities, D elements per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data.store.filter_index import Answers, FilterIndex
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.kernels.operators import count_block
from kge_torchrec.models.scorers.base import SIDES, Scorer, Side
from kge_torchrec.ranking.blocks import (
    FETCH_BYTES,
    erase,
    local_scores,
    restrict,
    score_block,
    scoring,
)
from kge_torchrec.ranking.candidates import Candidates
from kge_torchrec.ranking.metrics import Ranks


@dataclass(frozen=True)
class RankOptions:
    """Options of ``rank_triples``.

    Args:
        sides: The sides to rank.
        candidates: Restricts the candidates, which ``Ranks.restricted`` records. A true answer
            outside them gets the last rank, N.
        block_bytes: The size of a block of scores in bytes. None: the default of the device.
        batch_size: Queries per batch.
        progress: Called with the number of queries since the last call, like ``tqdm.update``.
    """

    sides: Sequence[Side] = SIDES
    candidates: Candidates | None = None
    block_bytes: int | None = None
    batch_size: int = 512
    progress: Callable[[int], object] | None = None


def rank_triples(
    scorer: Scorer,
    shard: EntityShard,
    triples: Tensor | np.ndarray,
    known: FilterIndex | None,
    options: RankOptions = RankOptions(),
) -> Ranks:
    """Rank the true head and tail of every triple among all N entities. Collective.

    A NaN counts against the model: a candidate with NaN ranks before the true answer, and a true
    answer with NaN gets the last rank, N.

    Args:
        scorer: The scorer.
        shard: The entity rows of this rank.
        triples: (T, 3) int64 head, relation, tail; the same on every rank.
        known: Triples to remove from the candidates, except the true one. None ranks unfiltered.
            For validation, the caller leaves the test triples out.
        options: Which sides and candidates are ranked, and in which pieces.

    Raises:
        ValueError: ``triples`` has another shape.
        IndexError: An entity id is outside [0, N).
    """
    triples = torch.as_tensor(triples, dtype=torch.int64)
    if triples.ndim != 2 or triples.shape[1] != 3:
        raise ValueError(f"triples must have shape (T, 3), not {tuple(triples.shape)}")
    candidates, counter = options.candidates, Counter(scorer, shard, known, options)
    optimistic, pessimistic, outside = {}, {}, {}
    with scoring(scorer):
        for side in options.sides:
            less, equal = counter.count(triples, side)
            pessimistic[side] = shard.num_entities - less
            # A NaN true score has equal = 0, not even itself; without the minimum it ranks N + 1.
            optimistic[side] = np.minimum(pessimistic[side] - equal + 1, pessimistic[side])
            if candidates is not None:
                own = are_candidates(candidates, triples.numpy(), side, options.batch_size)
                outside[side] = ~own
                for kind in (optimistic, pessimistic):
                    kind[side] = np.where(outside[side], shard.num_entities, kind[side])
    return Ranks(optimistic, pessimistic, None if candidates is None else candidates.label, outside)


def are_candidates(
    candidates: Candidates, triples: np.ndarray, side: Side, batch_size: int
) -> np.ndarray:
    """Return whether each true answer is a candidate of its own query: (T,) bool."""
    answers = triples[:, 2 if side == "tail" else 0]
    return np.concatenate(
        [
            candidates.contain(side, triples[part, 1], answers[part])
            for part in _slices(len(triples), batch_size)
        ]
    )


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, max(total, 1), size)]


@dataclass(frozen=True)
class Counter:
    """Counts the candidates that score below the true answer or tie with it, batch by batch."""

    scorer: Scorer
    shard: EntityShard
    known: FilterIndex | None
    options: RankOptions

    def count(self, triples: Tensor, side: Side) -> np.ndarray:
        """Return the counts of lower and equal scores over all ranks: (2, T) int64. Collective.

        Entities that are not candidates count as lower.
        """
        if self.options.candidates is None:
            return self._count_in_order(triples, side)
        # Sort by relation, since the queries of a relation share one mask of candidates.
        order = triples[:, 1].argsort(stable=True)
        counts = np.empty((2, len(triples)), np.int64)
        counts[:, order.numpy()] = self._count_in_order(triples[order], side)
        return counts

    def _count_in_order(self, triples: Tensor, side: Side) -> np.ndarray:
        counts = torch.zeros(2, len(triples), dtype=torch.int64, device=self.shard.device)
        done = 0
        for queries, anchor, target in self._fetched(triples, side):
            size = len(queries)
            less, equal = counts[:, done : done + size]
            self._count_batch(queries, anchor, target, side, less, equal)
            done += size
            if self.options.progress is not None:
                self.options.progress(size)
        return reduced(counts).cpu().numpy()

    def _fetched(self, triples: Tensor, side: Side) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield batches of queries (B, 3) with their anchor and target rows (B, D).

        A query is (anchor, relation, target). One collective fetches the rows of several batches.
        """
        queries = triples if side == "tail" else triples.flip(1)
        size = self.options.batch_size
        batches = max(1, FETCH_BYTES // (2 * 4 * self.shard.dim * size))
        for group in queries.split(batches * size):
            ids = torch.cat([group[:, 0], group[:, 2]]).to(self.shard.device)
            anchor, target = self.shard.fetch(ids).view(2, len(group), self.shard.dim)
            yield from zip(*(x.split(size) for x in (group, anchor, target)), strict=True)

    def _count_batch(
        self,
        queries: Tensor,
        anchor: Tensor,
        target: Tensor,
        side: Side,
        less: Tensor,
        equal: Tensor,
    ) -> None:
        """Add the counts of this rank's rows to less and equal, both (B,)."""
        relation = queries[:, 1].to(anchor.device)
        # Every rank computes the true scores with the same product as the blocks. Ties are thus
        # exact without a second pass or another collective.
        true = score_block(self.scorer, anchor, relation, target, side).diagonal().contiguous()
        filtered, own = self._known_answers(queries, side), _Targets(queries[:, 2], true)
        inputs = anchor, relation, side, self.options.block_bytes
        blocks = local_scores(self.scorer, self.shard, *inputs)
        for first, scores in blocks:
            own.make_room(scores)
            erase(scores, first, filtered)
            if self.options.candidates is not None:
                restrict(scores, first, self.options.candidates, (queries[:, 1], side))
            own.restore(scores, first)
            count_block(scores, own.true, less, equal)

    def _known_answers(self, queries: Tensor, side: Side) -> Answers:
        if self.known is None:
            return Answers(len(queries), [])
        anchors, relations, _ = queries.numpy().T
        return self.known.answers(side, anchors, relations)


class _Targets:
    """The true answers' own scores, which the filter erases and which must tie with themselves.

    The filter writes -inf, which must be below every true score. A query whose true score is -inf
    is therefore counted with other values: 0 for a score of -inf and 1 for a better score.

    Attributes:
        true: (B,) float32, the true scores to compare with.
    """

    def __init__(self, ids: Tensor, true: Tensor):
        self._ids = ids.to(true.device)
        self._worst = (true == -torch.inf).nonzero()[:, 0]
        self.true = true.index_fill(0, self._worst, 0.0)

    def make_room(self, scores: Tensor) -> None:
        """Replace the scores (B, n) of queries whose true score is -inf by 0 and 1, in place."""
        if len(self._worst):
            scores[self._worst] = (scores[self._worst] != -torch.inf).float()  # a NaN gets 1

    def restore(self, scores: Tensor, first: int) -> None:
        """Write the true scores into the block of scores (B, n) that starts at entity ``first``."""
        column = self._ids - first
        query = ((column >= 0) & (column < scores.shape[1])).nonzero()[:, 0]
        scores[query, column[query]] = self.true[query]
