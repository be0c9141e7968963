"""The objective for queries with any number of answers against sampled entities.

Shapes: U unique entities of the batch, D elements per entity row, Q queries, M answers, K sampled
entities per side; q queries and m answers of one side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kge_torchrec.kernels.side_rows import Gather
from kge_torchrec.models.model import Objective, at_least_float32
from kge_torchrec.models.scorers.base import Side

if TYPE_CHECKING:
    from kge_torchrec.data.batches.queries import QuerySample


class QueryObjective(Objective):
    """Mean over the batch's queries of a loss over their answers, plus regularizers.

    The penalties of a query's answers are averaged, as if each query were one triple.
    """

    def forward(self, rows: Tensor, batch: QuerySample) -> Tensor:
        """Compute the scalar loss from the rows (U, D) of the batch's ids."""
        if batch.relation.numel() == 0:
            return self.nothing(rows)
        if batch.bags is not None:
            rows = batch.bags.composed(rows)
        sizes = [*batch.queries, *batch.answers, *[batch.known.shape[1]] * len(self.sides)]
        ids = batch.entities
        taken = Gather.apply(rows, ids, sizes) if batch.deduplicated else rows.split(sizes)
        count = len(self.sides)
        parts = zip(
            taken[:count],
            batch.relation.split(batch.queries),
            taken[count : 2 * count],
            batch.query.split(batch.answers),
            taken[2 * count :],
            batch.known.split(batch.queries),
            self.sides,
            strict=True,
        )
        return sum(self._loss_of_side(*part) for part in parts) * batch.weight

    def _loss_of_side(
        self,
        anchor: Tensor,
        relation: Tensor,
        answer: Tensor,
        query: Tensor,
        sampled: Tensor,
        known: Tensor,
        side: Side,
    ) -> Tensor:
        """Sum the losses of the queries of one side.

        Args:
            anchor: (q, D) entity rows.
            relation: (q,) int64 relation ids.
            answer: (m, D) entity rows.
            query: (m,) the query of each answer.
            sampled: (K, D) entity rows.
            known: (q, K) bool, true where a sampled entity is an answer.
            side: The end that answers and sampled entities are.
        """
        if relation.numel() == 0:
            return self.nothing(sampled)
        with self.autocast(anchor.device):
            x, answers, candidates = (self.entity_dropout(x) for x in (anchor, answer, sampled))
            encoded = self.scorer.encode(x[None], relation[None], side)
            each = tree_map_only(Tensor, lambda part: part.index_select(1, query), encoded)
            positive = at_least_float32(self.scorer.pairs(each, answers[None])[0])
            negative = self.scorer.matrix(encoded, candidates[None], exact=False)[0]
            negative = at_least_float32(negative)
        total = self.loss(positive, query, negative, ~known).sum()
        if self.penalizes:
            # bincount would wait for the GPU to return the largest value.
            counts = query.new_zeros(len(anchor)).index_add_(0, query, torch.ones_like(query))
            share = 1 / counts.index_select(0, query)
            penalties = self.regularizers
            total = total + penalties.of_entities(self.scorer, anchor).sum()
            total = total + penalties.of_relations(self.scorer, relation, side).sum()
            total = total + (penalties.of_entities(self.scorer, answer) * share).sum()
        return total
