"""One rank's view of the queries of a step with all entities as candidates.

    QueryShard    queries on one side, and their answers and anchors on this rank
    GatheredRows  rows that every rank needs in this step, and the reduction of their gradients

Shapes: q queries, M answers of these in a block, n rows on this rank, m rows of a block, D elements
per row; F gathered rows, repeats included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from kge_torchrec.data.batches.queries import SideQueries
from kge_torchrec.data.store.filter_index import Answers
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.over_all import BlockAnswers
from kge_torchrec.models.scorers.base import Scorer


def directed(sides: Sequence[SideQueries], scorer: Scorer) -> list[SideQueries]:
    """Return the queries in the form for scoring.

    With reciprocal relations, head queries become tail queries of the inverse relation.  Those of
    both sides are one group, unless their candidates differ.
    """
    if not scorer.reciprocal:
        return list(sides)
    inverses = [part.relation + (part.side == "head") * scorer.num_relations for part in sides]
    if any(part.candidates is not None for part in sides):
        pairs = zip(sides, inverses, strict=True)
        return [replace(part, side="tail", relation=inverse) for part, inverse in pairs]
    weights = [part.weight for part in sides if part.weight is not None]
    return [
        SideQueries(
            "tail",
            np.concatenate([part.anchor for part in sides]),
            np.concatenate(inverses),
            Answers.joined([part.answers for part in sides]),
            np.concatenate(weights) if weights else None,
        )
    ]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, asynchronously to a GPU.

    Asynchronous copies need pinned memory, which torch keeps until the copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class QueryShard:
    """Queries on one side, and their answers and anchors on this rank.

    Attributes:
        queries: The queries, on the host.
        relation: (q,) relation ids.
        weight: (q,) float32, weight of each query in the loss; None: all weights are equal.
        encoded: The parts of the encoded queries that need gradients, detached from their graph.
        graph: The same tensors with their graph, back to anchors and relations.
        gradients: Sums of the gradients of ``encoded``.
    """

    def __init__(self, queries: SideQueries, shard: EntityShard):
        self.queries, self.side = queries, queries.side
        self.device, (start, stop) = shard.rows.device, shard.row_range
        self.relation = to_device(queries.relation, self.device)
        weight, counts = queries.weight, queries.answers.counts
        self.weight = None if weight is None else to_device(weight, self.device)
        self._first_row = start
        self._share = (1 / np.maximum(counts, 1)).astype(np.float32)
        self._counts = to_device(counts, self.device)
        own = np.flatnonzero((queries.anchor >= start) & (queries.anchor < stop))
        own = own[np.argsort(queries.anchor[own], kind="stable")]
        self._anchor, self._query_of_anchor = queries.anchor[own] - start, own

    def encode(self, scorer: Scorer, anchors: Tensor) -> None:
        """Encode the queries of anchor rows (q, D)."""
        encoded = scorer.encode(anchors[None], self.relation[None], self.side)
        self._leaves, self._form = tree_flatten(encoded)
        places = [
            i for i, x in enumerate(self._leaves) if isinstance(x, Tensor) and x.requires_grad
        ]
        self.graph = [self._leaves[i] for i in places]
        self.encoded = [x.detach().requires_grad_() for x in self.graph]
        self.gradients = [torch.zeros_like(x) for x in self.encoded]
        for i, cut in zip(places, self.encoded, strict=True):
            self._leaves[i] = cut

    def edges(self) -> np.ndarray:
        """Return where candidates start and stop on this rank, as positions of its rows."""
        candidates = self.queries.candidates
        return np.empty(0, np.int64) if candidates is None else candidates.ravel() - self._first_row

    def scores(self, scorer: Scorer, entities: Tensor, block: range) -> Tensor:
        """Score the queries against the rows of a block, which has no ``edges`` inside.

        The result is not reshaped: autograd would copy a view when it is overwritten.

        Args:
            scorer: The scorer.
            entities: (m, D), from ``Scorer.entity``.
            block: The positions of the rows on this rank.

        Returns:
            (1, q, m), or (1, q, 0) if these rows are no candidates.
        """
        if self.queries.candidates is not None:
            start, stop = (self.queries.candidates - self._first_row).T
            if not ((start <= block.start) & (block.start < stop)).any():
                return entities.new_zeros(1, len(self.relation), 0)
        query = tree_unflatten(self._leaves, self._form)
        return scorer.row_comparison.matrix(query, entities[None], exact=False)

    def answers(self, block: range) -> BlockAnswers:
        """Return the answers among the rows of a block."""
        first = self._first_row + block.start
        query, entity = self.queries.answers.between(first, self._first_row + block.stop)
        arrays = query, entity - first, self._share[query]
        places, columns, shares = (to_device(x, self.device) for x in arrays)
        return BlockAnswers(places, columns, shares, self._counts)

    def penalized(self, block: range, answers: BlockAnswers) -> tuple[Tensor, Tensor]:
        """Return the positions of anchors and answers in a block, and their weights in the loss."""
        anchors = slice(*np.searchsorted(self._anchor, (block.start, block.stop)))
        anchor = to_device(self._anchor[anchors] - block.start, self.device)
        query, answer, share, _ = answers
        anchor_weights = share.new_ones(len(anchor))
        if self.weight is not None and self.queries.weight is not None:
            weight = self.queries.weight[self._query_of_anchor[anchors]]
            anchor_weights = to_device(weight, self.device)
            share = share * self.weight.index_select(0, query)
        return torch.cat([anchor, answer]), torch.cat([anchor_weights, share])


class GatheredRows:
    """The rows of anchors, and optionally of answers, gathered on every rank.  Collective.

    Args:
        sides: The queries.
        shard: This rank's rows.
        with_answers: Whether to gather answers; then every query must have exactly one.

    Attributes:
        rows: (F, D) float32, the same on every rank; a leaf that requires gradients.
        anchors: (q, D) views of ``rows`` for each of ``sides``.
        answers: (q, D) views for each of ``sides``, or None without answers.
    """

    def __init__(self, sides: Sequence[SideQueries], shard: EntityShard, with_answers: bool):
        device, (start, stop) = shard.rows.device, shard.row_range
        ids = [part.anchor for part in sides]
        ids += [part.answers.all()[1] for part in sides] if with_answers else []
        all_ids = np.concatenate(ids)
        position = np.flatnonzero((all_ids >= start) & (all_ids < stop))
        # Each row of this shard among them once, in order.
        self._own, inverse = np.unique(all_ids[position] - start, return_inverse=True)
        arrays = self._own, position, inverse
        self._own_rows, self._position, self._inverse = (to_device(x, device) for x in arrays)
        own = shard.rows.detach().index_select(0, self._own_rows).float()
        rows = own.new_zeros(len(all_ids), own.shape[1])
        rows.index_copy_(0, self._position, own.index_select(0, self._inverse))
        self.rows = reduced(rows).requires_grad_()
        with torch.enable_grad():
            parts = self.rows.split([len(part) for part in ids])
        self.anchors = parts[: len(sides)]
        self.answers = parts[len(sides) :] or [None] * len(sides)

    def add_gradients(self, grad: Tensor, blocks: Sequence[Tensor]) -> None:
        """Reduce the terms of the gradients (F, D) of ``rows``; add them to this rank's rows.

        Collective.  ``blocks`` (m, D) are the gradients of all n rows, in blocks of consecutive
        rows.
        """
        own = reduced(grad).index_select(0, self._position)
        sums = own.new_zeros(len(self._own), own.shape[1]).index_add_(0, self._inverse, own)
        start = 0
        for block in blocks:
            low, high = np.searchsorted(self._own, (start, start + len(block)))
            block.index_add_(0, self._own_rows[low:high] - start, sums[low:high])
            start += len(block)
