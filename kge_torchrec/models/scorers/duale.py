"""DualE (Cao et al. 2021): score(h, r, t) = <h r*, t>, dual quaternions, r* of unit length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kge_torchrec.models.scorers.algebra import AlgebraScorer, cayley_dickson, components, dual


class DualE(AlgebraScorer):
    """D real numbers a row make D/8 dual quaternions a + e b, stored as a's four, then b's four.

    A relation c + e d is used as r* = c / |c| + e (d - c <c, d> / |c|^2), a rotation and a
    translation: as in the authors' code the second part is made orthogonal to the first and keeps
    its length.  Raises ValueError when D is no multiple of 8.
    """

    name = "duale"

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, table=dual(cayley_dickson(2)), **shared)

    def factor(self, relation: Tensor) -> Tensor:
        real, other = components(relation, 8).split(4, -1)
        real = nn.functional.normalize(real, dim=-1)
        other = other - real * (real * other).sum(-1, keepdim=True)
        return torch.cat([real, other], -1).flatten(-2)
