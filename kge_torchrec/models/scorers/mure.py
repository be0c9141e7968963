"""MuRE (Balazevic et al. 2019): score(h, r, t) = -||R_r h - (t + v_r)||^2 + b_h + c_t."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.models.scorers.base import Fill, QueryScorer, Side
from kge_torchrec.models.scorers.distance import euclidean
from kge_torchrec.models.scorers.pairwise import pairwise
from kge_torchrec.models.scorers.start import uniform


class Weighted(NamedTuple):
    """-||point - scale * vector of row||^2 + bias + the row's own bias."""

    point: Tensor  # (..., D - 2)
    scale: Tensor | None  # (..., D - 2); None is 1
    bias: Tensor  # (..., 1)


class MuRE(QueryScorer):
    """R_r is diagonal, v_r a translation.

    An entity's row is its vector of D - 2 numbers, then its biases b as a head and c as a tail,
    which start as the vector does (at 0 in the authors' code).  A relation's row is the diagonal,
    then the translation.  Raises ValueError when D < 3.
    """

    name = "mure"
    bias_columns = 2

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, relation_dim=2 * (dim - 2), **shared)

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Translations take the configured draw, diagonals start uniform in [-1, 1)."""
        super().reset_parameters(fill, stream)
        uniform(self.relations[:, : self.dim - 2], 1.0, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Weighted:
        (vector, as_head, as_tail), (scale, shift) = _parts(anchor), relation.chunk(2, -1)
        if side == "tail":
            return Weighted(vector * scale - shift, None, as_head)
        return Weighted(vector + shift, scale, as_tail)

    def similarity(self, query: Weighted, rows: Tensor) -> Tensor:
        vector, as_head, as_tail = _parts(rows)
        if query.scale is None:
            distance, own = (query.point - vector).square().sum(-1), as_tail
        else:
            distance, own = -_score(query.point, query.scale, vector), as_head
        return query.bias[..., 0] + own[..., 0] - distance

    def similarity_matrix(self, query: Weighted, rows: Tensor) -> Tensor:
        vector, as_head, as_tail = _parts(rows)
        if query.scale is None:
            score, own = -euclidean(query.point, vector).square(), as_tail
        else:
            score = pairwise(_score, [query.point, query.scale], [vector], self.dim)
            own = as_head
        return score + query.bias + own.transpose(-1, -2)


def _parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Vector (..., D - 2), bias as a head (..., 1), bias as a tail (..., 1)."""
    return rows.split([rows.shape[-1] - 2, 1, 1], -1)


def _score(point: Tensor, scale: Tensor, vector: Tensor) -> Tensor:
    return -(point - scale * vector).square().sum(-1)
