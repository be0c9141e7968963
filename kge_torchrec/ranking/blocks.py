"""Scores of a few queries against all local rows, one block of rows at a time.

Exact ties must stay ties however the entities are split: two equal rows have to get the same
score bit for bit in whichever block, shard or column they stand.  Matrix products give that as
long as no side of them is very small (libraries switch kernels, hence the order of summation,
below a dozen rows), so both sides are padded to ``SMALLEST`` rows.

Shapes: B queries, n rows of one block, D numbers per entity.
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

if TYPE_CHECKING:  # it imports TorchRec, which an exported model does without
    from kge_torchrec.embeddings.backend import EntityShard

SMALLEST = 64  # queries and rows per product; 16 suffice with MKL, more leaves room for threads
CPU_BLOCK_BYTES = 8 << 20  # about what stays in cache until the scores are counted
CUDA_BLOCK_BYTES = 256 << 20  # enough work per kernel launch


@contextmanager
def scoring(scorer: Scorer) -> Iterator[None]:
    """Whole float32 products, no gradients and evaluation mode inside; all is put back after.

    Training may allow itself TF32; ranks and answers are of float32 scores in any case.
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
    """Scores whose bits depend on the query and the row alone, not on the block around them.

    anchor: (B, D); relation: (B,); rows: (n, D).  Returns a new contiguous (B, n) float32.
    """
    return _block_scores(scorer, anchor, relation, side)(rows)


def _block_scores(
    scorer: Scorer, anchor: Tensor, relation: Tensor, side: Side
) -> Callable[[Tensor], Tensor]:
    """``score_block`` as a function of the rows: a network encodes its queries once."""
    scores = scorer.prepared(_padded(anchor), _padded(relation), side)
    queries = anchor.shape[0]
    return lambda rows: scores(_padded(rows.float()))[:queries, : len(rows)].float().contiguous()


def local_scores(
    scorer: Scorer,
    shard: EntityShard,
    anchor: Tensor,
    relation: Tensor,
    side: Side,
    block_bytes: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yields (global id of the first row, scores (B, n)) over all rows that this rank holds.

    One block takes about block_bytes; the default suits the device.
    """
    height = block_height(anchor.shape[0], shard.rows.device, block_bytes)
    scores = _block_scores(scorer, anchor, relation, side)
    for first in range(0, shard.rows.shape[0], height):
        rows = shard.rows[first : first + height]
        yield shard.first_row + first, scores(rows)


def block_height(queries: int, device: torch.device, block_bytes: int | None = None) -> int:
    """Rows per block so that B x n float32 scores take at most block_bytes, but at least 64."""
    if block_bytes is None:
        block_bytes = CUDA_BLOCK_BYTES if device.type == "cuda" else CPU_BLOCK_BYTES
    return max(SMALLEST, block_bytes // (4 * max(queries, SMALLEST)))


def erase(scores: Tensor, first: int, answers: Answers, value: float = -torch.inf) -> None:
    """Writes value over the scores of answers in a block of the entities from ``first`` on.

    scores: (B, n), contiguous, of the B queries that ``answers`` is of.  Takes the memory of one
    piece of them, however many there are.
    """
    width, flat = scores.shape[1], scores.view(-1)
    for query, entity in answers.pieces(first, first + width):
        place = torch.from_numpy(query * width + (entity - first))
        if scores.is_cuda:  # pinned, so that nobody waits for the device
            place = place.pin_memory().to(scores.device, non_blocking=True)
        flat.index_fill_(0, place, value)


def _padded(x: Tensor) -> Tensor:
    """At least SMALLEST rows, by zeros (id 0 for relations)."""
    missing = SMALLEST - x.shape[0]
    return x if missing <= 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
