"""ConvQ (Demir et al. 2021): score(h, r, t) = <conv(h, r) * (h r), t>, quaternions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kge_torchrec.models.scorers.algebra import cayley_dickson, product
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.models.scorers.residual_convolution import ConvolvedScorer


class ConvQ(ConvolvedScorer):
    """QMult whose product is multiplied, number by number, by a convolution of h and r.

    D real numbers a row make D/4 quaternions a + b i + c j + d k, stored (a, b, c, d, a, ...).
    Answers tail queries only.  Raises ValueError when D is no multiple of 4 or not reciprocal.
    """

    name = "convq"
    units, levels = 4, 2
    table: Tensor  # of the product, (units, units, units)

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = True, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, **shared)
        self.register_buffer("table", cayley_dickson(self.levels), persistent=False)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return self.convolution(anchor, relation) * product(anchor, relation, self.table)
