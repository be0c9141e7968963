"""A knowledge-graph model: the entity lookup, then scorer and loss, to one number.

With what the training types have in common: regularizers on the rows that a batch touches; relation
prediction as an auxiliary objective (Chen et al. 2021); and the taking of rows, whose gradients
meet in one buffer.  ``triple_objective`` and ``query_objective`` are of sampled candidates;
training against all entities splits its objective over blocks and ranks, and has no forward.

Shapes: U unique entities of the batch, M indices, D numbers a row, C chunks, b triples a chunk, R
relation rows (inverses included).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kge_torchrec.data import ENTITY
from kge_torchrec.kernels.operators import sums_by_row
from kge_torchrec.models.loss_scaling import GradientBarrier, LossScale
from kge_torchrec.models.ops import Dropout
from kge_torchrec.models.regularizers import Regularizers
from kge_torchrec.models.scorers.base import SIDES, Scorer, Side


class EntityDropout(Dropout):
    """Drops numbers of entity rows, whoever they are looked up for (LibKGE's embedder dropout).

    biases: columns at the end of a row that are no part of its vector and stay.
    """

    def __init__(self, share: float, biases: int = 0):
        super().__init__(share)
        self.biases = biases

    def forward(self, rows: Tensor) -> Tensor:
        """(..., D) -> (..., D)"""
        if not self.drops:
            return rows
        if not self.biases:
            return super().forward(rows)
        vector, biases = rows.split([rows.shape[-1] - self.biases, self.biases], -1)
        return torch.cat([super().forward(vector), biases], -1)

    @property
    def drops(self) -> bool:
        """Whether numbers are dropped now."""
        return self.training and self.p > 0


class Objective(nn.Module):
    """Scorer, loss and regularizers of a training type.

    All dense parameters of a model live below this module, which is what the dense wrappers wrap.

    precision: scores are computed under autocast to it; losses and regularizers are float32.
    entity_dropout: share of the numbers of entity rows that are dropped; penalties see them all.
    """

    def __init__(
        self,
        scorer: Scorer,
        loss: nn.Module,
        sides: tuple[Side, ...] = SIDES,
        regularizers: Regularizers | None = None,
        relation_weight: float = 0.0,
        precision: torch.dtype = torch.float32,
        entity_dropout: float = 0.0,
    ):
        super().__init__()
        self.scorer, self.loss, self.sides = scorer, loss, sides
        self.regularizers = regularizers or Regularizers()
        self.relation_weight, self.precision = relation_weight, precision
        self.entity_dropout = EntityDropout(entity_dropout, scorer.bias_columns)

    def nothing(self, rows: Tensor) -> Tensor:
        """0, with a gradient for everything: of a rank whose part of a batch is empty.

        It still takes part in every exchange.
        """
        return rows.sum() * 0 + sum(p.sum() for p in self.scorer.parameters()) * 0

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """In which scores are computed."""
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self.precision)

    @property
    def penalizes(self) -> bool:
        """Whether there is a penalty on anything."""
        return self.regularizers.any or self.scorer.penalizes_relations

    @property
    def penalizes_relations(self) -> bool:
        """Whether there is a penalty on relations."""
        return self.regularizers.any_of_relations or self.scorer.penalizes_relations

    def penalty_of_entities(self, rows: Tensor) -> Tensor:
        """(..., D) -> (...): their weighted regularizers."""
        return self.regularizers.of(self.scorer.entity_factors(rows), self.scorer.is_complex)

    def penalty_of_relations(self, relation: Tensor, side: Side) -> Tensor:
        """(...) ids of queries -> (...): weighted regularizers, and what the scorer has itself."""
        factors = self.scorer.relation_factors(relation, side)
        total = self.regularizers.of_relations(factors, self.scorer.relation_is_complex)
        if self.scorer.penalizes_relations:
            total = total + self.scorer.relation_penalty(relation, side)
        return total


def relation_prediction(
    scorer: Scorer, anchor: Tensor, relation: Tensor, target: Tensor, side: Side
) -> Tensor:
    """-log p(r | h, t): cross-entropy of a triple's relation among all, given its two entities.

    anchor, target: (C, b, D); relation: (C, b) int64 ids.  Returns (C, b).  With reciprocal
    relations the choice is among relations and inverses, and on side "head" the inverse is right,
    as if the inverse triples were in the data; else both sides are the same but for dropout.
    """
    scores = scorer.score_relations(anchor, target, side)  # (C, b, R)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    answer, _ = scorer.direct(relation, side)
    return cross_entropy(scores.movedim(-1, 1), answer, reduction="none")


def take_rows(rows: Tensor, index: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """rows[index] in parts of the given sizes: (U, D), (M,) int64 -> (size, D) each.

    Indexing separately would give autograd one gradient of all rows per part, to be added up.
    On a CPU duplicate indices sum their gradients in a fixed order, so that runs repeat bitwise.
    """
    return _TakeRows.apply(rows, index, sizes)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return tuple(rows.index_select(0, part) for part in index.split(sizes))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return sums_by_row(index, grads, ctx.count), None, None


class KGEModel(nn.Module):
    """entities -> rows -> loss.

    ``entities`` is called as ``entities(batch.ids)[ENTITY].values()``, (U, D).  The forward stays
    this short because TorchRec traces it to find the lookup that it pipelines; everything with
    control flow lives in the objective.

    scales_loss: multiply the loss by a dynamic scale and hold the rows' gradients back.
    """

    def __init__(self, entities: nn.Module, objective: Objective, scales_loss: bool = False):
        super().__init__()
        self.entities, self.objective = entities, objective
        self.hold = GradientBarrier() if scales_loss else nn.Identity()
        self.scale = LossScale() if scales_loss else nn.Identity()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns (loss to differentiate, the loss itself, detached)."""
        rows = self.entities(batch.ids)[ENTITY].values()
        loss = self.objective(self.hold(rows), batch)
        return self.scale(loss), loss.detach()
