"""Scores of a few queries against all local entity rows, one block of rows at a time.

Equal rows must get the same score bit for bit in every block, shard and column; otherwise exact
ties would depend on how the table is sharded. Matrix products guarantee this unless one side is
very small: below a dozen rows, libraries switch kernels and with them the order of summation.
Both sides are therefore padded to ``SMALLEST`` rows, and queries to a multiple of it: torch rounds
complex products in another way where the last elements do not fill a vector register.

Shapes: B queries, n rows of one block, D elements per row, T triples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kge_torchrec.data.store.filter_index import Answers
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

    Args:
        scorer: The scorer.
        anchor: (B, D), the known entity of each query.
        relation: (B,) int64.
        rows: (n, D).
        side: The side to score candidates for.

    Returns:
        (B, n) float32, new and contiguous.
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


def triple_scores(scorer: Scorer, shard: EntityShard, triples: Tensor, side: Side) -> Tensor:
    """Return the scores (T,) float32 of triples, bit for bit those of ``local_scores``. Collective.

    Args:
        scorer: The scorer.
        shard: The entity rows of this rank.
        triples: (T, 3) int64.
        side: Score as a query for the "tail" or the "head". With reciprocal relations the two
            scores differ.
    """
    queries = triples if side == "tail" else triples.flip(1)
    # Only a block of scores has the same bits as in ranking; its diagonal is kept. Small blocks
    # waste fewer products, and large ones need fewer kernels.
    size = (8 if shard.device.type == "cuda" else 2) * SMALLEST
    fetched = max(1, FETCH_BYTES // (2 * 4 * shard.dim * size)) * size
    scores = [torch.empty(0, device=shard.device)]
    with scoring(scorer):
        for group in queries.split(fetched):
            ids = group[:, ::2].T.flatten().to(shard.device)
            anchor, target = shard.fetch(ids).view(2, len(group), shard.dim)
            relation = group[:, 1].to(anchor.device)
            for first in range(0, len(group), size):
                part = slice(first, first + size)
                block = score_block(scorer, anchor[part], relation[part], target[part], side)
                scores.append(block.diagonal().clone())
    return torch.cat(scores)


def local_scores(
    scorer: Scorer,
    shard: EntityShard,
    anchor: Tensor,
    relation: Tensor,
    side: Side,
    block_bytes: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (global id of the first row, scores (B, n)) for all rows of this rank.

    Args:
        scorer: The scorer.
        shard: The rows of this rank.
        anchor: (B, D).
        relation: (B,) int64.
        side: The side to score candidates for.
        block_bytes: The size of a block of scores in bytes. None: the default of the device.
    """
    height = block_height(anchor.shape[0], shard.device, block_bytes)
    scores = _block_scores(scorer, anchor, relation, side)
    for first in range(0, shard.rows.shape[0], height):
        rows = shard.own(slice(first, first + height))
        yield shard.first_row + first, scores(rows)


def block_height(queries: int, device: torch.device, block_bytes: int | None = None) -> int:
    """Return the rows per block, so that (B, n) float32 scores fit block_bytes; at least 64."""
    if block_bytes is None:
        block_bytes = CUDA_BLOCK_BYTES if device.type == "cuda" else CPU_BLOCK_BYTES
    return max(SMALLEST, block_bytes // (4 * max(queries, SMALLEST)))


def erase(scores: Tensor, first: int, answers: Answers, value: float = -torch.inf) -> None:
    """Overwrite the scores of answers in a block, in place.

    The answers are read in pieces, so memory does not grow with their number.

    Args:
        scores: (B, n), contiguous: entities ``first`` to ``first`` + n - 1.
        first: The id of the first entity.
        answers: The answers of the B queries.
        value: The new score.
    """
    width, flat = scores.shape[1], scores.view(-1)
    for query, entity in answers.pieces(first, first + width):
        place = torch.from_numpy(query * width + (entity - first))
        if scores.is_cuda:  # pinned memory makes the copy asynchronous
            place = place.pin_memory().to(scores.device, non_blocking=True)
        flat.index_fill_(0, place, value)


def restrict(
    scores: Tensor,
    first: int,
    candidates: Candidates,
    queries: tuple[Tensor, Side],
    value: float = -torch.inf,
) -> None:
    """Overwrite the scores of entities that are not candidates of their query, in place.

    Args:
        scores: (B, n): entities ``first`` to ``first`` + n - 1.
        first: The id of the first entity.
        candidates: The candidates.
        queries: The relations (B,) of the queries and their side. Neighbors of one relation share
            a mask.
        value: The new score.
    """
    relations, side = queries
    distinct, sizes = relations.unique_consecutive(return_counts=True)
    stop = first + scores.shape[1]
    for relation, rows in zip(distinct.tolist(), scores.split(sizes.tolist()), strict=True):
        mask = torch.from_numpy(candidates.mask(side, relation, first, stop))
        rows.masked_fill_(~mask.to(rows.device), value)


def _padded(x: Tensor, missing: int) -> Tensor:
    """Append rows of zeros; a padded relation has id 0."""
    return x if missing <= 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
