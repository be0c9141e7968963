"""ComplEx (Trouillon et al. 2016): score(h, r, t) = Re(sum_k h_k r_k conj(t_k))."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kge_torchrec.models.scorers.base import DotScorer, Side
from kge_torchrec.models.scorers.complex_numbers import as_complex, as_real, require_even


class ComplEx(DotScorer):
    """D real numbers a row make D/2 complex ones.

    As Re(x conj(y)) is the inner product of x and y as real vectors, the tail query is h r and
    the head query t conj(r).  Raises ValueError when D is odd.
    """

    is_complex = relation_is_complex = True

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False):
        require_even(dim, "complex")
        super().__init__(num_relations, dim, reciprocal)
        self.relations = nn.Parameter(torch.empty(self.relation_rows, dim))

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        factor = as_complex(nn.functional.embedding(relation, self.relations))
        if side == "head":
            factor = factor.conj()
        return as_real(as_complex(anchor) * factor)
