"""Scorer and loss of queries with any number of answers.

Shapes: U unique entities of the batch, D numbers a row, Q queries, M answers, K sampled entities a
side; q and m of one side.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kge_torchrec.models.objective import Objective, take_rows
from kge_torchrec.models.scorers.base import Side


class SampledQueries(Protocol):
    """What the objective reads of a batch; everything side after side."""

    entities: Tensor  # (Q + M + sides K): anchors, answers, sampled entities
    relation: Tensor  # (Q,)
    query: Tensor  # (M,) which query of its side an answer belongs to
    known: Tensor  # (Q, K) bool: answers among the entities sampled for the query's side
    weight: Tensor  # (): share of a query in the global mean
    queries: tuple[int, ...]  # of each side
    answers: tuple[int, ...]  # of each side
    deduplicated: bool  # False: there is a row for each of ``entities``, in their order


class QueryObjective(Objective):
    """Mean over the batch's queries of a loss of ``answer_losses``, plus penalties.

    The scorer is a QueryScorer.  Answers are penalised by their mean, as if each query were one
    triple.
    """

    def forward(self, rows: Tensor, batch: SampledQueries) -> Tensor:
        """rows: (U, D) of the batch's ids.  Returns the loss, a scalar."""
        if batch.relation.numel() == 0:  # a rank without queries takes part in every exchange
            return self._nothing(rows)
        sizes = [*batch.queries, *batch.answers, *[batch.known.shape[1]] * len(self.sides)]
        ids = batch.entities
        taken = take_rows(rows, ids, sizes) if batch.deduplicated else rows.split(sizes)
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

    def _nothing(self, rows: Tensor) -> Tensor:
        """0, with a gradient for everything."""
        return rows.sum() * 0 + sum(p.sum() for p in self.scorer.parameters()) * 0

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
        """The sum over the queries of one side; anchor (q, D), answer (m, D), sampled (K, D)."""
        if relation.numel() == 0:
            return self._nothing(sampled)
        with self._autocast(anchor.device):
            scores = self.scorer.score_answers(anchor, relation, answer, query, sampled, side)
        positive, negative = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in scores)
        total = self.loss(positive, query, negative, ~known).sum()
        if self.penalties.any:
            factors = self.scorer.relation_factors(relation, side)
            share = 1 / torch.bincount(query, minlength=len(anchor)).index_select(0, query)
            total = total + self.penalties.of(anchor, self.scorer.is_complex).sum()
            total = total + self.penalties.of(factors, self.scorer.relation_is_complex).sum()
            of_answers = self.penalties.of(answer, self.scorer.is_complex)
            total = total + (of_answers * share).sum()
        return total
