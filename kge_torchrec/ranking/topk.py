"""The exact k best answers of a query over all shards.

A score and an entity id are packed into one int64 key, which sorts by score and then by smaller
id. Keys are unique, so the result does not depend on blocks or ranks. Only scores that can still
be among the k best of their query get a key, which is few of them after the first block.

Shapes: B queries, n rows of a block, k answers, m contenders per query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.data.store.filter_index import Answers
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.ranking.blocks import erase, local_scores, restrict, scoring

if TYPE_CHECKING:
    from kge_torchrec.ranking.candidates import Candidates

ID_LIMIT = 2**32 - 1  # the largest id; ids use the lower half of a key
NOTHING = torch.iinfo(torch.int64).min  # the key of an excluded or missing answer


class Queries(NamedTuple):
    """Queries of one side, such as (anchor, relation, ?) for "tail"."""

    anchors: Tensor  # (B,) int64, the known entities
    relations: Tensor  # (B,) int64
    side: Side  # the missing side
    only: Candidates | None = None  # the entities that may be answers; None: all


def top_k(
    scorer: Scorer,
    shard: EntityShard,
    queries: Queries,
    k: int,
    exclude: Answers | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k best entities of each query, the same on every rank. Collective.

    Args:
        scorer: The scorer.
        shard: The entity rows of this rank.
        queries: The queries, the same on every rank.
        k: The number of answers.
        exclude: Answers of the B queries to leave out, such as the known ones.

    Returns:
        Scores (B, k) float32, best first, and ids (B, k) int64. Equal scores come in order of id;
        NaN counts as -inf. Missing answers have score -inf and id -1.

    Raises:
        ValueError: ``k`` is below 1.
        IndexError: An id is outside [0, N).
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    device = shard.device
    best = torch.full((len(queries.anchors), k), NOTHING, device=device)
    with scoring(scorer):
        inputs = shard.fetch(queries.anchors.to(device)), queries.relations.to(device), queries.side
        for first, scores in local_scores(scorer, shard, *inputs):
            scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
            if exclude is not None:
                erase(scores, first, exclude, torch.nan)
            if queries.only is not None:
                restrict(scores, first, queries.only, queries[1:3], torch.nan)
            best = with_block(best, scores, first)
    return best_of_ranks(best, shard.ranks)


def with_block(best: Tensor, scores: Tensor, first: int) -> Tensor:
    """Return the best keys (B, k) so far and of one more block.

    Args:
        best: (B, k) int64, the best keys of each query so far; ``NOTHING`` before the first block.
        scores: (B, n), the scores of entities ``first`` to ``first`` + n - 1; NaN is no answer.
        first: The id of the first entity.
    """
    return _best(torch.cat([best, _contenders(scores, first, best)], 1), best.shape[1])


def best_of_ranks(best: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the scores and ids (B, k) of the best keys (B, k) of all ranks. Collective."""
    return _unpack(_best(_gather(best, ranks), best.shape[1]))


def _contenders(scores: Tensor, first: int, best: Tensor) -> Tensor:
    """Return the keys (B, m) of the scores (B, n) of a block that can be among the k best.

    Args:
        scores: The scores of entities ``first`` to ``first`` + n - 1; NaN is no answer.
        first: The id of the first entity.
        best: (B, k), the best keys of each query so far, in descending order.
    """
    k, least = best.shape[1], _unpack(best[:, -1])[0]
    if k < scores.shape[1] and bool(least.isneginf().any()):  # such as in the first block
        own = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).topk(k, sorted=False).values
        least = torch.maximum(least, own.amin(1))
    query, column = (scores >= least[:, None]).nonzero(as_tuple=True)
    counts = query.bincount(minlength=len(scores))
    place = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
    keys = torch.full((len(scores), int(counts.max())), NOTHING, device=scores.device)
    keys[query, place] = _keys(scores[query, column], first + column)
    return keys


def _keys(scores: Tensor, ids: Tensor) -> Tensor:
    """Return the int64 keys of scores and ids of one shape."""
    # Adding zero turns -0.0 into 0.0, which is equal but has different bits.
    return (_order((scores + 0.0).view(torch.int32)).long() << 32) + (ID_LIMIT - ids)


def _order(bits: Tensor) -> Tensor:
    """Map float bits to integers of the same order, and back.

    Integers order the bits of negative floats in reverse, so these bits are flipped.
    """
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _best(keys: Tensor, k: int) -> Tensor:
    return keys.topk(min(k, keys.shape[1]), dim=1).values


def _gather(keys: Tensor, ranks: int) -> Tensor:
    """Gather the keys (B, k) of all ranks: (B, ranks * k)."""
    if ranks == 1:
        return keys
    parts = [torch.empty_like(keys) for _ in range(ranks)]
    dist.all_gather(parts, keys)
    return torch.cat(parts, 1)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores (B, k) and ids (B, k) of keys (B, k)."""
    missing = keys == NOTHING
    scores = _order((keys >> 32).int()).view(torch.float32)
    ids = ID_LIMIT - (keys & ID_LIMIT)
    return scores.masked_fill(missing, -torch.inf), ids.masked_fill(missing, -1)
