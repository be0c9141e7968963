"""Scores of a few queries against all local entity rows, one block of rows at a time.

Equal rows must get the same score bit for bit in every block, shard and column; otherwise exact
ties would depend on how the table is sharded. Matrix products guarantee this unless one side is
very small: below a dozen rows, libraries switch kernels and with them the order of summation.
Both sides are therefore padded to ``SMALLEST`` rows, and queries to a multiple of it: torch rounds
complex products in another way where the last elements do not fill a vector register.

Shapes: B queries, n rows of one block, m entities per query, D elements per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import RELATION, TAIL, answer_column
from kge_torchrec.data.store.filter_index import Answers
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.environment import without_tf32
from kge_torchrec.models.scorers.base import Scorer, Side

if TYPE_CHECKING:  # imports TorchRec, which an exported model doesn't need
    from kge_torchrec.embeddings.backend import EntityShard
    from kge_torchrec.ranking.candidates import Candidates

SMALLEST = 64  # queries and rows per product; 16 suffice with MKL, 64 allows for more threads
CPU_BLOCK_BYTES = 8 << 20  # small enough for the scores to stay in cache until they are counted
CUDA_BLOCK_BYTES = 256 << 20  # enough work per kernel launch
FETCH_BYTES = 32 << 20  # entity rows per fetch, enough for several batches


@contextmanager
def scoring(scorer: Scorer) -> Iterator[None]:
    """Score in evaluation mode, without gradients and TF32, and restore the settings afterwards.

    Training may use TF32. Ranks and answers always come from float32 products.
    """
    training = scorer.training
    scorer.eval()
    try:
        with torch.no_grad(), without_tf32():
            yield
    finally:
        scorer.train(training)


def score_block(
    scorer: Scorer, anchor: Tensor, relation: Tensor, rows: Tensor, side: Side
) -> Tensor:
    """Return scores whose bits depend only on the query and the row, not on the block.

    Anchors (B, D), relations (B,), rows (n, D) -> (B, n) float32, new and contiguous.
    """
    return _block_scores(scorer, anchor, relation, side)(rows)


def _block_scores(
    scorer: Scorer, anchor: Tensor, relation: Tensor, side: Side
) -> Callable[[Tensor], Tensor]:
    """Return ``score_block`` as a function of the rows, so that queries are encoded only once."""
    missing = -len(anchor) % SMALLEST
    query = scorer.encode(_padded(anchor, missing)[None], _padded(relation, missing)[None], side)

    def scores(rows: Tensor) -> Tensor:
        block = scorer.matrix(query, _padded(rows.float(), SMALLEST - len(rows))[None])[0]
        return block[: len(anchor), : len(rows)].float().contiguous()

    return scores


class Queries(NamedTuple):
    """Queries of one side, such as (anchor, relation, ?) for "tail"."""

    anchors: Tensor  # (B,) int64, the known entities
    relations: Tensor  # (B,) int64
    side: Side  # the missing side
    only: Candidates | None = None  # the entities that may be answers; None: all

    @classmethod
    def of(cls, triples: np.ndarray, side: Side) -> tuple[Queries, np.ndarray]:
        """Return the queries that triples (B, 3) complete, and the answers (B, 1)."""
        answer = answer_column(side)
        anchors, relations = triples[:, [TAIL - answer, RELATION]].T.copy()
        asked = cls(torch.from_numpy(anchors), torch.from_numpy(relations), side)
        return asked, triples[:, [answer]]


class Scores:
    """Scores of entities as answers to queries: those of a model, or of a baseline.

    Args:
        shard: The entity rows of this rank, which are those that it scores.
    """

    def __init__(self, shard: EntityShard):
        self.shard = shard

    def blocks(self, queries: Queries, block_bytes: int | None) -> Iterator[tuple[int, Tensor]]:
        """Yield (id of the first entity, new scores (B, n) float32) for this rank. Collective."""
        raise NotImplementedError

    def of(self, queries: Queries, entities: np.ndarray) -> Tensor:
        """Return the scores (B, m) float32 of entities (B, m), bit for bit those of ``blocks``.

        Collective. The score of a negative id means nothing.
        """
        raise NotImplementedError

    def _ranges(self, queries: int, block_bytes: int | None) -> Iterator[tuple[int, int]]:
        """Yield the first id of each block of this rank, and the one after its last."""
        first, stop = self.shard.row_range
        height = block_height(queries, self.shard.device, block_bytes)
        for low in range(first, stop, height):
            yield low, min(low + height, stop)


class ModelScores(Scores):
    """The scores of a scorer."""

    def __init__(self, scorer: Scorer, shard: EntityShard):
        super().__init__(shard)
        self.scorer = scorer

    def blocks(self, queries: Queries, block_bytes: int | None) -> Iterator[tuple[int, Tensor]]:
        shard = self.shard
        anchors = shard.fetch(queries.anchors.to(shard.device))
        relations = queries.relations.to(shard.device)
        with scoring(self.scorer):
            scores_of = _block_scores(self.scorer, anchors, relations, queries.side)
        for first, stop in self._ranges(len(anchors), block_bytes):
            rows = shard.own(slice(first - shard.first_row, stop - shard.first_row))
            with scoring(self.scorer):
                scores = scores_of(rows)
            yield first, scores

    def of(self, queries: Queries, entities: np.ndarray) -> Tensor:
        shard = self.shard
        if entities.size and entities.max() >= shard.num_entities:
            raise IndexError(f"entity ids must lie in [0, {shard.num_entities})")
        # Small blocks waste fewer products, and large ones need fewer kernels.
        size = (8 if shard.device.type == "cuda" else 2) * SMALLEST
        fetched = max(1, FETCH_BYTES // (4 * shard.dim * size)) * size
        found = torch.zeros(entities.shape, device=shard.device)
        for start in range(0, len(entities), fetched):
            group = slice(start, start + fetched)
            anchors = shard.fetch(queries.anchors[group].to(shard.device)).split(size)
            relations = queries.relations[group].to(shard.device).split(size)
            for part in zip(anchors, relations, found[group].split(size), strict=True):
                self._fill(*part, queries.side, entities[start : start + size])
                start += size
        return found if shard.ranks == 1 else reduced(found)  # the others are 0

    def _fill(
        self, anchors: Tensor, relations: Tensor, found: Tensor, side: Side, entities: np.ndarray
    ) -> None:
        """Write the scores of entities (B, m) of this rank, taken from blocks of all of them."""
        shard, (first, stop) = self.shard, self.shard.row_range
        query, column = np.nonzero((entities >= first) & (entities < stop))
        distinct, place = np.unique(entities[query, column] - first, return_inverse=True)
        height = block_height(len(entities), shard.device)
        with scoring(self.scorer):
            scores_of = _block_scores(self.scorer, anchors, relations, side)
            for low in range(0, len(distinct), height):
                rows = shard.own(torch.from_numpy(distinct[low : low + height]).to(shard.device))
                inside = (place >= low) & (place < low + height)
                taken = query[inside], column[inside], place[inside] - low
                row, col, at = (torch.from_numpy(x).to(shard.device) for x in taken)
                found[row, col] = scores_of(rows)[row, at]


def block_height(queries: int, device: torch.device, block_bytes: int | None = None) -> int:
    """Return the rows per block, so that (B, n) float32 scores fit block_bytes; at least 64."""
    if block_bytes is None:
        block_bytes = CUDA_BLOCK_BYTES if device.type == "cuda" else CPU_BLOCK_BYTES
    return max(SMALLEST, block_bytes // (4 * max(queries, SMALLEST)))


def erase(scores: Tensor, first: int, answers: Answers) -> None:
    """Overwrite the scores (B, n) of answers to the B queries in a block by NaN, in place.

    The answers are read in pieces, so memory does not grow with their number. ``first`` is the id
    of the first entity.
    """
    width, flat = scores.shape[1], scores.view(-1)
    for query, entity in answers.pieces(first, first + width):
        place = torch.from_numpy(query * width + (entity - first))
        if scores.is_cuda:  # pinned memory makes the copy asynchronous
            place = place.pin_memory().to(scores.device, non_blocking=True)
        flat.index_fill_(0, place, torch.nan)


def restrict(scores: Tensor, first: int, queries: Queries, candidates: Candidates) -> None:
    """Overwrite the scores (B, n) of entities that are no candidates by NaN, in place."""
    for relation, rows in by_relation(scores, queries.relations):
        mask = candidates.mask(queries.side, relation, first, first + scores.shape[1])
        rows.masked_fill_(~torch.from_numpy(mask).to(rows.device), torch.nan)


def by_relation(scores: Tensor, relations: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each relation and the scores of its queries; neighbors of one relation are together."""
    distinct, sizes = relations.unique_consecutive(return_counts=True)
    return zip(distinct.tolist(), scores.split(sizes.tolist()), strict=True)


def _padded(x: Tensor, missing: int) -> Tensor:
    """Append rows of zeros; a padded relation has id 0."""
    return x if missing <= 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
