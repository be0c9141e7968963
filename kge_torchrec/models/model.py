"""A knowledge-graph model: entity lookup, scorer and loss, down to one scalar.

This file has what training types share, such as relation prediction as an auxiliary objective
(Chen et al. 2021). ``triple_objective`` and ``query_objective`` are the objectives for sampled
candidates. Training against all entities splits its objective over blocks and ranks, and has no
forward.

Shapes: U unique entities of the batch, D elements per entity row, C chunks, b triples per chunk, R
relation rows (inverses included).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kge_torchrec.data import ENTITY
from kge_torchrec.models.loss_scaling import GradientBarrier, LossScale
from kge_torchrec.models.losses import Loss
from kge_torchrec.models.regularizers import Regularizers
from kge_torchrec.models.scorers.base import SIDES, Scorer, Side
from kge_torchrec.models.scorers.layers import Dropout


def at_least_float32(scores: Tensor) -> Tensor:
    """Return scores in float32, or unchanged if their type is wider."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


class EntityDropout(Dropout):
    """Dropout of entity rows, for queries and candidates alike (LibKGE's embedder dropout).

    Args:
        share: Dropout probability.
        biases: Number of trailing bias columns, which are kept.
    """

    def __init__(self, share: float, biases: int = 0):
        super().__init__(share)
        self.biases = biases

    def forward(self, rows: Tensor) -> Tensor:
        """Apply dropout: (..., D) -> (..., D)."""
        if not self.biases or not self.p:
            return super().forward(rows)
        vector, biases = rows.split([rows.shape[-1] - self.biases, self.biases], -1)
        return torch.cat([super().forward(vector), biases], -1)


class Objective(nn.Module):
    """Scorer, loss and regularizers of a training type.

    All dense parameters of a model belong to this module, which the dense wrappers wrap.

    Args:
        scorer: The scorer.
        loss: The loss.
        sides: The sides to train.
        regularizers: Penalties on rows and triples.
        relation_weight: Weight of the relation-prediction loss.
        precision: dtype of autocast for scores. Losses and regularizers are float32.
        entity_dropout: Dropout probability for entity rows. Penalties use rows without dropout.
        hardest: Keep only this many candidates of each query, those with the highest scores; 0:
            all.
    """

    def __init__(
        self,
        scorer: Scorer,
        loss: Loss,
        sides: tuple[Side, ...] = SIDES,
        regularizers: Regularizers | None = None,
        relation_weight: float = 0.0,
        precision: torch.dtype = torch.float32,
        entity_dropout: float = 0.0,
        hardest: int = 0,
    ):
        super().__init__()
        self.scorer, self.loss, self.sides = scorer, loss, sides
        self.regularizers = regularizers or Regularizers()
        self.penalizes = bool(
            self.regularizers.on_relations
            or self.regularizers.on_entities
            or self.regularizers.on_triples
        )
        self.relation_weight, self.precision = relation_weight, precision
        self.hardest = hardest
        self.entity_dropout = EntityDropout(entity_dropout, scorer.bias_columns)

    def nothing(self, rows: Tensor) -> Tensor:
        """Return 0 with a gradient for every parameter and row.

        A rank whose part of a batch is empty uses it, because it must still take part in every
        collective.
        """
        return rows.sum() * 0 + sum(p.sum() for p in self.scorer.parameters()) * 0

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which scores are computed."""
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self.precision)


def relation_prediction(
    scorer: Scorer, anchor: Tensor, relation: Tensor, target: Tensor, side: Side
) -> Tensor:
    """Return the relation-prediction loss -log p(r | h, t) (Chen et al. 2021).

    The loss is the cross-entropy of a triple's relation among all relations. With reciprocal
    relations the choices include inverses, and on side "head" the inverse is the right answer, as
    if the inverse triples were in the data. Otherwise both sides give the same loss except for
    dropout.

    Args:
        scorer: The scorer.
        anchor: (C, b, D) entity rows.
        relation: (C, b) int64 relation ids.
        target: (C, b, D) entity rows.
        side: The end that the target is.

    Returns:
        (C, b) losses.
    """
    scores = at_least_float32(scorer.relation_scores(anchor, target, side))  # (C, b, R)
    answer, _ = scorer.direct(relation, side)
    # A GPU takes many times as long for a softmax over any dimension but the last of two.
    losses = cross_entropy(scores.flatten(0, -2), answer.flatten(), reduction="none")
    return losses.view(answer.shape)


class KGEModel(nn.Module):
    """Maps entity ids to rows and rows to a loss.

    The forward stays short because TorchRec traces it to find the lookup that it pipelines; all
    control flow is in the objective.

    Args:
        entities: The entity table.
        objective: The objective.
        scales_loss: Whether to multiply the loss by a dynamic scale and hold back the gradients of
            rows.
    """

    def __init__(self, entities: nn.Module, objective: Objective, scales_loss: bool = False):
        super().__init__()
        self.entities, self.objective = entities, objective
        self.hold = GradientBarrier() if scales_loss else nn.Identity()
        self.scale = LossScale() if scales_loss else nn.Identity()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss to differentiate (scaled) and the plain loss, detached."""
        rows = self.entities(batch.ids)
        if not isinstance(rows, Tensor):  # TorchRec gives them by the name of the feature
            rows = rows[ENTITY].values()
        loss = self.objective(self.hold(rows), batch)
        return self.scale(loss), loss.detach()
