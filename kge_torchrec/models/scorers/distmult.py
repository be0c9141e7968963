"""DistMult (Yang et al. 2015): score(h, r, t) = sum_d h_d r_d t_d."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kge_torchrec.models.scorers.base import DotScorer, Side


class DistMult(DotScorer):
    """Bilinear with a diagonal relation; symmetric in head and tail.  D real numbers a row."""

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False):
        super().__init__(num_relations, dim, reciprocal)
        self.relations = nn.Parameter(torch.empty(self.relation_rows, dim))

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return anchor * nn.functional.embedding(relation, self.relations)
