"""ComplEx (Trouillon et al. 2016): score(h, r, t) = Re(sum_k h_k r_k conj(t_k))."""

from __future__ import annotations

from torch import Tensor

from kge_torchrec.models.scorers.base import Side, TrilinearScorer
from kge_torchrec.models.scorers.complex_numbers import times


class ComplEx(TrilinearScorer):
    """D real numbers a row make D/2 complex ones.

    As Re(x conj(y)) is the inner product of x and y as real vectors, the tail query is h r and
    the head query t conj(r).  Raises ValueError when D is odd.
    """

    name = "complex"
    is_complex = relation_is_complex = True

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return times(anchor, relation, conjugate=side == "head")

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return times(tail, head, conjugate=True)
