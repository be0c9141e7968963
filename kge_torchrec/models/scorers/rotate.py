"""RotatE (Sun et al. 2019): score(h, r, t) = -sum_k |h_k e^(i r_k) - t_k|."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.models.scorers.base import Fill, QueryScorer, Side
from kge_torchrec.models.scorers.complex_distance import complex_distance
from kge_torchrec.models.scorers.complex_numbers import rotated
from kge_torchrec.models.scorers.start import uniform


class RotatE(QueryScorer):
    """Relations are rotations of D/2 complex numbers; a relation row holds D/2 phases.

    A rotation keeps distances, so the head query is t e^(-i r).  Raises ValueError when D is odd.
    """

    name = "rotate"
    is_complex = True  # entities only: relations are phases
    # its loop takes torch.compile two minutes, and then three times as long to run
    uncompiled = ("similarity_matrix",)

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, relation_dim=dim // 2, **shared)

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Phases start uniform over the circle: the configured distribution plays no part."""
        uniform(self.relations, math.pi, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return rotated(anchor, relation if side == "tail" else -relation)

    def similarity(self, query: Tensor, rows: Tensor) -> Tensor:
        # 1e-12 keeps the gradient of |x| finite at x = 0.
        squares = (query - rows).unflatten(-1, (-1, 2)).square().sum(-1)
        return -(squares + 1e-12).sqrt().sum(-1)

    def similarity_matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        return -complex_distance(query, rows)
