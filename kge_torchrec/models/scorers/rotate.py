"""RotatE (Sun et al. 2019): score(h, r, t) = -sum_k |h_k e^(i r_k) - t_k|."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.models.scorers.base import Fill, QueryScorer, Side
from kge_torchrec.models.scorers.complex_distance import complex_distance
from kge_torchrec.models.scorers.complex_numbers import as_complex, as_real, require_even


class RotatE(QueryScorer):
    """Relations are rotations of D/2 complex numbers; a relation row holds D/2 phases.

    A rotation keeps distances, so the head query is t e^(-i r).  Raises ValueError when D is odd.
    """

    is_complex = True  # entities only: relations are phases

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False):
        require_even(dim, "rotate")
        super().__init__(num_relations, dim, reciprocal)
        self.relations = nn.Parameter(torch.empty(self.relation_rows, dim // 2))

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Phases start uniform over the circle: the configured distribution plays no part."""
        phases = stream.uniform(-math.pi, math.pi, self.relations.shape)
        self.relations.copy_(torch.from_numpy(phases))

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        phase = nn.functional.embedding(relation, self.relations)
        turn = torch.polar(torch.ones_like(phase), phase if side == "tail" else -phase)
        return as_real(as_complex(anchor) * turn)

    def similarity(self, query: Tensor, rows: Tensor) -> Tensor:
        # 1e-12 keeps the gradient of |x| finite at x = 0.
        parts = (query - rows).unflatten(-1, (-1, 2)).square().sum(-1)
        return -(parts + 1e-12).sqrt().sum(-1)

    def similarity_matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        return -complex_distance(query, rows)
