"""One rank's view of the queries of a step with all entities as candidates.

    QueryShard    queries on one side, and their answers and anchors on this rank
    GatheredRows  rows that every rank needs in this step, and the reduction of their gradients

Shapes: q queries, m rows of a block, D elements per row; F gathered rows, repeats included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from kge_torchrec.data.batches.queries import SideQueries
from kge_torchrec.data.store.filter_index import Answers
from kge_torchrec.distributed.processes import world_size
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.pending import RowGradients
from kge_torchrec.kernels.comparisons import score_candidates
from kge_torchrec.models.full_losses import BlockAnswers
from kge_torchrec.models.scorers.base import Scorer
from kge_torchrec.models.scorers.queries import QueryScorer


def directed(asked: Sequence[SideQueries], scorer: Scorer) -> list[SideQueries]:
    """Return the queries in the form for scoring.

    With reciprocal relations, head queries become tail queries of the inverse relation.
    """
    if not scorer.reciprocal:
        return list(asked)
    inverses = [part.relation + (part.side == "head") * scorer.num_relations for part in asked]
    return [
        SideQueries(
            "tail",
            np.concatenate([part.anchor for part in asked]),
            np.concatenate(inverses),
            Answers.joined([part.answers for part in asked]),
            _joined_weights(asked),
        )
    ]


def _joined_weights(asked: Sequence[SideQueries]) -> np.ndarray | None:
    parts = [part.weight for part in asked if part.weight is not None]
    return np.concatenate(parts) if parts else None


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, asynchronously to a GPU.

    Asynchronous copies need pinned memory, which torch keeps until the copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class QueryShard:
    """Encoded queries on one side, and their answers and anchors on this rank.

    Attributes:
        relation: (q,) relation ids.
        weight: (q,) float32, weight of each query in the loss; None: all weights are equal.
        encoded: The parts of the encoded queries that need gradients, detached from their graph.
        graph: The same tensors with their graph, back to anchors and relations.
        gradients: Sums of the gradients of ``encoded``.
    """

    def __init__(self, asked: SideQueries, shard: EntityShard):
        device, (start, stop) = shard.rows.device, shard.row_range
        self.side, self.device = asked.side, device
        self.relation = to_device(asked.relation, device)
        self._weight = asked.weight
        self.weight = None if asked.weight is None else to_device(asked.weight, device)
        self._answers, self._first_row = asked.answers, start
        self._share = (1 / np.maximum(asked.answers.counts, 1)).astype(np.float32)
        own = np.flatnonzero((asked.anchor >= start) & (asked.anchor < stop))
        own = own[np.argsort(asked.anchor[own], kind="stable")]
        self._anchor, self._query_of_anchor = asked.anchor[own] - start, own

    def encode_query(self, scorer: QueryScorer, anchors: Tensor) -> None:
        """Encode the queries of anchor rows (q, D)."""
        encoded = scorer.encode_query(anchors[None], self.relation[None], self.side)
        self._leaves, self._form = tree_flatten(encoded)
        places = [
            i for i, x in enumerate(self._leaves) if isinstance(x, Tensor) and x.requires_grad
        ]
        self.graph = [self._leaves[i] for i in places]
        self.encoded = [x.detach().requires_grad_() for x in self.graph]
        self.gradients = [torch.zeros_like(x) for x in self.encoded]
        for i, cut in zip(places, self.encoded, strict=True):
            self._leaves[i] = cut

    def scores(self, scorer: QueryScorer, entities: Tensor) -> Tensor:
        """Score the queries against candidates.

        The result is not reshaped: autograd would copy a view when it is overwritten.

        Args:
            scorer: The scorer.
            entities: (m, D), from ``Scorer.entity``.

        Returns:
            (1, q, m).
        """
        query = tree_unflatten(self._leaves, self._form)
        return score_candidates(scorer, query, entities[None])

    def answers(self, block: range) -> BlockAnswers:
        """Return the answers among the rows of a block."""
        first = self._first_row + block.start
        query, entity = self._answers.between(first, self._first_row + block.stop)
        arrays = query, entity - first, self._share[query]
        return BlockAnswers(*(to_device(x, self.device) for x in arrays))

    def weights(self, weight: float) -> Tensor:
        """Return (q,) the weights of the queries in the loss, with ``weight`` as common factor."""
        if self.weight is None:
            return torch.full((len(self.relation),), weight, device=self.device)
        return self.weight * weight

    def touched(self, block: range, answers: BlockAnswers) -> tuple[Tensor, Tensor]:
        """Return the positions of anchors and answers in a block, and their weights in the loss."""
        found = slice(*np.searchsorted(self._anchor, (block.start, block.stop)))
        anchor = to_device(self._anchor[found] - block.start, self.device)
        query, answer, share = answers
        of_anchors = share.new_ones(len(anchor))
        if self.weight is not None and self._weight is not None:
            of_anchors = to_device(self._weight[self._query_of_anchor[found]], self.device)
            share = share * self.weight.index_select(0, query)
        return torch.cat([anchor, answer]), torch.cat([of_anchors, share])


class GatheredRows:
    """The rows of anchors, and optionally of answers, gathered on every rank.  Collective.

    Args:
        asked: The query shards.
        shard: This rank's rows.
        with_answers: Whether to gather answers; then every query must have exactly one.

    Attributes:
        rows: (F, D) float32, the same on every rank; a leaf that requires gradients.
        anchors: (q, D) views of ``rows`` for each query shard.
        answers: (q, D) views for each query shard, or None without answers.
    """

    def __init__(self, asked: Sequence[SideQueries], shard: EntityShard, with_answers: bool):
        self.device, (start, stop) = shard.rows.device, shard.row_range
        ids = [part.anchor for part in asked]
        ids += [part.answers.all()[1] for part in asked] if with_answers else []
        every = np.concatenate(ids)
        position = np.flatnonzero((every >= start) & (every < stop))
        # Rows of this shard whose gradients are complete only after the last block.
        self._held, inverse = np.unique(every[position] - start, return_inverse=True)
        arrays = self._held, position, inverse
        self._rows_held, self._position, self._inverse = (to_device(x, self.device) for x in arrays)
        self._gradients = torch.zeros(len(self._held), shard.dim, device=self.device)
        self.rows = self._fetch(shard, len(every)).requires_grad_()
        with torch.enable_grad():
            parts = self.rows.split([len(part) for part in ids])
        self.anchors = parts[: len(asked)]
        self.answers = parts[len(asked) :] or [None] * len(asked)

    def _fetch(self, shard: EntityShard, count: int) -> Tensor:
        out = torch.zeros(count, shard.dim, device=self.device)
        own = shard.rows.detach().index_select(0, self._rows_held).float()
        out.index_copy_(0, self._position, own.index_select(0, self._inverse))
        return _summed(out)

    def hold_back(self, block: range, grad: Tensor) -> RowGradients:
        """Return the gradients (m, D) of a block's rows, but keep those of gathered rows."""
        low, high = np.searchsorted(self._held, (block.start, block.stop))
        held = self._rows_held[low:high] - block.start
        rows = _all_but(held, len(block))
        if low < high:
            self._gradients[low:high] = grad.index_select(0, held)
            grad = grad.index_select(0, rows)
        return RowGradients(rows + block.start, grad, None, True)

    def add(self, grad: Tensor) -> None:
        """Reduce the ranks' terms of the gradients (F, D) of ``rows`` and add them.  Collective."""
        own = _summed(grad).index_select(0, self._position)
        self._gradients.index_add_(0, self._inverse, own)

    def completed(self, block: range, grad: Tensor) -> RowGradients:
        """Return the gradients (m, D) of a block's rows plus the added gradients."""
        low, high = np.searchsorted(self._held, (block.start, block.stop))
        grad.index_add_(0, self._rows_held[low:high] - block.start, self._gradients[low:high])
        rows = torch.arange(block.start, block.stop, device=self.device)
        return RowGradients(rows, grad, None, True)

    def gradients(self) -> RowGradients:
        """Return the gradients of the gathered rows on this rank."""
        return RowGradients(self._rows_held, self._gradients, None, True)


def _all_but(held: Tensor, count: int) -> Tensor:
    """Return 0 to count - 1 without ``held`` (ascending), without device synchronization."""
    kept = torch.arange(count - len(held), device=held.device)
    # Exactly held[k] - k of the kept positions are before held[k].
    before = held - torch.arange(len(held), device=held.device)
    return kept + torch.searchsorted(before, kept, right=True)


def _summed(x: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x
