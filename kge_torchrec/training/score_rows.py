"""Any loss over all entities: autograd over complete rows of scores.

A rank has the scores of its own entities for all queries.  The ranks exchange scores so that each
of them has the scores of all entities for its share of the queries.  There it calls the loss, and
sends the gradients of the scores back.

Shapes: Q queries, q queries of this rank's share, M answers of these, n rows on this rank, N
entities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.distributed.processes import gathered, world_size
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.losses import Loss


def row_ranges(shard: EntityShard) -> list[range]:
    """Return the global ids of the rows on each rank.  Collective."""
    own = torch.tensor(shard.row_range, device=shard.rows.device)
    return [range(*ends.tolist()) for ends in gathered(own)]


def shares(queries: int) -> list[range]:
    """Split Q queries over the ranks."""
    world = world_size()
    edges = [queries * rank // world for rank in range(world + 1)]
    return [range(*edges[rank : rank + 2]) for rank in range(world)]


def to_complete_rows(scores: Tensor, ranges: Sequence[range]) -> Tensor:
    """Exchange the scores of this rank's entities for those of its queries.  Collective.

    Args:
        scores: (Q, n).
        ranges: Rows of each rank, from ``row_ranges``.

    Returns:
        (q, N).
    """
    if len(ranges) == 1:
        return scores
    own = shares(len(scores))[dist.get_rank()]
    counts = [len(own) * len(rows) for rows in ranges]
    received = scores.new_empty(sum(counts))
    sent = [len(share) * scores.shape[1] for share in shares(len(scores))]
    dist.all_to_all_single(received, scores.contiguous().view(-1), counts, sent)
    parts = received.split(counts)
    complete = scores.new_empty(len(own), sum(map(len, ranges)))
    for rows, part in zip(ranges, parts, strict=True):
        complete[:, rows.start : rows.stop] = part.view(len(own), len(rows))
    return complete


def to_owners(gradients: Tensor, ranges: Sequence[range], queries: int) -> Tensor:
    """Invert ``to_complete_rows`` for gradients (q, N): return (Q, n).  Collective."""
    if len(ranges) == 1:
        return gradients
    columns = len(ranges[dist.get_rank()])
    parts = [gradients[:, rows.start : rows.stop].reshape(-1) for rows in ranges]
    counts = [len(share) * columns for share in shares(queries)]
    received = gradients.new_empty(sum(counts))
    dist.all_to_all_single(received, torch.cat(parts), counts, [len(part) for part in parts])
    return received.view(queries, columns)


def losses_of_rows(
    loss: Loss, scores: Tensor, query: Tensor, answer: Tensor, block_bytes: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the losses of answers, some at a time, against the entities that are no answers.

    Args:
        loss: The loss.
        scores: (q, N), complete rows.
        query: (M,) the query of each answer.
        answer: (M,) entities.
        block_bytes: Size of the scores that are copied at a time.

    Yields:
        Which answers, their losses (m,) with a graph, and the copied scores (m, N), a leaf.
    """
    known = torch.zeros_like(scores, dtype=torch.bool)
    known[query, answer] = True
    step = max(1, block_bytes // (4 * scores.shape[1]))
    for start in range(0, len(query), step):
        some = slice(start, start + step)
        rows = scores.index_select(0, query[some]).requires_grad_()
        with torch.enable_grad():
            positive = rows.gather(1, answer[some, None])[:, 0]
            mask = ~known.index_select(0, query[some])
            losses = loss(positive[None], rows[None], mask[None])[0]
        yield some, losses, rows
