"""The queries of a step against all entities, as one rank sees them.

``QueryShard``: queries that a scorer answers in one direction, and which of their answers and
anchors live here.  ``GatheredRows``: the rows that every rank needs for a moment, and their
gradients on the way home.

Shapes: q queries, m rows of a block, D numbers a row; F gathered rows, repeats included, A distinct
ones that live on this rank.
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
from kge_torchrec.models.full_losses import BlockAnswers
from kge_torchrec.models.scorers.base import Scorer
from kge_torchrec.models.scorers.queries import QueryScorer


def directed(asked: Sequence[SideQueries], scorer: Scorer) -> list[SideQueries]:
    """The queries as they are scored: with reciprocal relations all of them as tail queries."""
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
    """A tensor of the array there; a GPU goes on with its work meanwhile.

    From pageable memory it would be waited for; torch keeps pinned memory until it was copied.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class QueryShard:
    """Folded queries, and which of their answers and anchors live here.

    Attributes:
        relation: (q,) ids.
        weight: (q,) float32 of each query in the loss; None weighs all alike.
        encoded: the parts of the encoded queries that have gradients, cut off from their graph.
        graph: the same with their graph, back to anchors and relations.
        gradients: sums of the gradients of ``encoded``.
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
        """Folds the queries of anchor rows (q, D)."""
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
        """(1, q, m) against rows as the scorer takes them, (m, D).

        As it comes: a view of it would be differentiated through a copy once it is overwritten.
        """
        query = tree_unflatten(self._leaves, self._form)
        return scorer.similarity_in_training(query, entities[None])

    def answers(self, block: range) -> BlockAnswers:
        """The answers among the rows of a block."""
        first = self._first_row + block.start
        query, entity = self._answers.between(first, self._first_row + block.stop)
        arrays = query, entity - first, self._share[query]
        return BlockAnswers(*(to_device(x, self.device) for x in arrays))

    def weights(self, weight: float) -> Tensor:
        """(q,) of each query in the loss, of which weight is a common factor."""
        if self.weight is None:
            return torch.full((len(self.relation),), weight, device=self.device)
        return self.weight * weight

    def touched(self, block: range, answers: BlockAnswers) -> tuple[Tensor, Tensor]:
        """Places in a block of anchors and its answers, and how much each counts in the loss."""
        found = slice(*np.searchsorted(self._anchor, (block.start, block.stop)))
        anchor = to_device(self._anchor[found] - block.start, self.device)
        query, answer, share = answers
        of_anchors = share.new_ones(len(anchor))
        if self.weight is not None and self._weight is not None:
            of_anchors = to_device(self._weight[self._query_of_anchor[found]], self.device)
            share = share * self.weight.index_select(0, query)
        return torch.cat([anchor, answer]), torch.cat([of_anchors, share])


class GatheredRows:
    """Rows of the queries' anchors, and of their answers if asked for.  Collective.

    with_answers: every query has exactly one.

    Attributes:
        rows: (F, D) float32, on every rank the same; a leaf to differentiate by.
        anchors: (queries, D) of it for each query shard.
        answers: the same of the answers, nothing without them.
    """

    def __init__(self, asked: Sequence[SideQueries], shard: EntityShard, with_answers: bool):
        self.device, (start, stop) = shard.rows.device, shard.row_range
        ids = [part.anchor for part in asked]
        ids += [part.answers.all()[1] for part in asked] if with_answers else []
        every = np.concatenate(ids)
        position = np.flatnonzero((every >= start) & (every < stop))
        # Rows of this shard whose gradient is not complete before all blocks are done.
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
        """Gradients (m, D) of a block's rows without those of fetched rows, which are kept."""
        low, high = np.searchsorted(self._held, (block.start, block.stop))
        held = self._rows_held[low:high] - block.start
        rows = _all_but(held, len(block))
        if low < high:
            self._gradients[low:high] = grad.index_select(0, held)
            grad = grad.index_select(0, rows)
        return RowGradients(rows + block.start, grad, None, True)

    def add(self, grad: Tensor) -> None:
        """Adds gradients (F, D) of ``rows``, which are this rank's part.  Collective."""
        own = _summed(grad).index_select(0, self._position)
        self._gradients.index_add_(0, self._inverse, own)

    def completed(self, block: range, grad: Tensor) -> RowGradients:
        """Gradients (m, D) of a block's rows with those that were added."""
        low, high = np.searchsorted(self._held, (block.start, block.stop))
        grad.index_add_(0, self._rows_held[low:high] - block.start, self._gradients[low:high])
        rows = torch.arange(block.start, block.stop, device=self.device)
        return RowGradients(rows, grad, None, True)

    def gradients(self) -> RowGradients:
        """Of the fetched rows that live here."""
        return RowGradients(self._rows_held, self._gradients, None, True)


def _all_but(held: Tensor, count: int) -> Tensor:
    """The places 0 to count - 1 without some, both ascending; nothing waits for the device."""
    kept = torch.arange(count - len(held), device=held.device)
    # Before held[k] there are held[k] - k places that are kept.
    before = held - torch.arange(len(held), device=held.device)
    return kept + torch.searchsorted(before, kept, right=True)


def _summed(x: Tensor) -> Tensor:
    """Over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x
