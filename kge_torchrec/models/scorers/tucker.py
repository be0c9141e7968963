"""TuckER (Balazevic et al. 2019): score(h, r, t) = core x_1 r x_2 h x_3 t."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.models.scorers.base import Fill, Side, TrilinearScorer
from kge_torchrec.models.scorers.rescal import bilinear_query, outer
from kge_torchrec.models.scorers.start import uniform


class TuckER(TrilinearScorer):
    """Relations share a core tensor (W, D, D): a relation's matrix is the sum of r_k core_k.

    relation_dim: W; None takes D.  feature_dropout: of the entries of a relation's matrix.  The
    authors' BatchNorm of head and query is left out; model.normalization layer is the nearest.
    """

    name = "tucker"

    def __init__(
        self,
        num_relations: int,
        dim: int,
        reciprocal: bool = False,
        *,
        relation_dim: int | None = None,
        feature_dropout: float = 0.0,
        **shared: Any,
    ):
        options = {"relation_dim": relation_dim, "feature_dropout": feature_dropout}
        width = relation_dim or dim
        super().__init__(
            num_relations, dim, reciprocal, relation_dim=width, options=options, **shared
        )
        self.core = nn.Parameter(torch.empty(width, dim, dim))
        self.feature_dropout = nn.Dropout(feature_dropout)

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """The core starts uniform in [-1, 1), as in the authors' code."""
        super().reset_parameters(fill, stream)
        uniform(self.core, 1.0, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        matrix = (relation @ self.core.flatten(1)).unflatten(-1, (self.dim, self.dim))
        return bilinear_query(anchor, self.feature_dropout(matrix), side)

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return outer(head, tail) @ self.core.flatten(1).t()
