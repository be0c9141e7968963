"""The queries of one step that a scorer answers in one direction, seen from one rank.

Shapes: q queries, m rows of a block, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from kge_torchrec.data.answers import Answers
from kge_torchrec.data.queries import Asked
from kge_torchrec.entities.contract import EntityShard
from kge_torchrec.models.full_losses import BlockAnswers
from kge_torchrec.models.scorers.base import QueryScorer, Scorer


def directed(asked: Sequence[Asked], scorer: Scorer) -> list[Asked]:
    """The queries by direction: with reciprocal relations all are tail queries, in one product."""
    if not scorer.reciprocal:
        return list(asked)
    twins = [part.relation + (part.side == "head") * scorer.num_relations for part in asked]
    return [
        Asked(
            "tail",
            np.concatenate([part.anchor for part in asked]),
            np.concatenate(twins),
            Answers.joined([part.answers for part in asked]),
        )
    ]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the array there; a GPU goes on with its work meanwhile.

    From pageable memory it would be waited for; torch keeps pinned memory until it was copied.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Direction:
    """Folded queries, and which of their answers and anchors live here.

    Attributes:
        relation: (q,) ids.
        folded: the parts of the folded queries that have gradients, cut off from their graph.
        graph: the same with their graph, back to anchors and relations.
        gradients: sums of the gradients of ``folded``.
    """

    def __init__(self, asked: Asked, shard: EntityShard):
        device, (start, stop) = shard.rows.device, shard.row_range
        self.side, self.device = asked.side, device
        self.relation = to_device(asked.relation, device)
        self._answers, self._first_row = asked.answers, start
        self._share = (1 / np.maximum(asked.answers.counts, 1)).astype(np.float32)
        own = (asked.anchor >= start) & (asked.anchor < stop)
        self._anchor = np.sort(asked.anchor[own] - start)

    def fold(self, scorer: QueryScorer, anchors: Tensor) -> None:
        """Folds the queries of anchor rows (q, D)."""
        folded = scorer.fold(anchors[None], self.relation[None], self.side)
        self._leaves, self._form = tree_flatten(folded)
        places = [
            i for i, x in enumerate(self._leaves) if isinstance(x, Tensor) and x.requires_grad
        ]
        self.graph = [self._leaves[i] for i in places]
        self.folded = [x.detach().requires_grad_() for x in self.graph]
        self.gradients = [torch.zeros_like(x) for x in self.folded]
        for i, cut in zip(places, self.folded, strict=True):
            self._leaves[i] = cut

    def scores(self, scorer: QueryScorer, entities: Tensor) -> Tensor:
        """(1, q, m) against rows as the scorer takes them, (m, D).

        As it comes: a view of it would be differentiated through a copy once it is overwritten.
        """
        query = tree_unflatten(self._leaves, self._form)
        return scorer.similarity_matrix(query, entities[None])

    def answers(self, block: range) -> BlockAnswers:
        """The answers among the rows of a block."""
        first = self._first_row + block.start
        query, entity = self._answers.between(first, self._first_row + block.stop)
        arrays = query, entity - first, self._share[query]
        return BlockAnswers(*(to_device(x, self.device) for x in arrays))

    def touched(self, block: range) -> tuple[Tensor, Tensor]:
        """Places in a block of anchors and answers, and how much each counts in its query."""
        found = slice(*np.searchsorted(self._anchor, (block.start, block.stop)))
        anchor = to_device(self._anchor[found] - block.start, self.device)
        _, answer, share = self.answers(block)
        return torch.cat([anchor, answer]), torch.cat([share.new_ones(len(anchor)), share])
