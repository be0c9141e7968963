"""QMult (Demir et al. 2021): score(h, r, t) = <h r, t>, quaternions with the Hamilton product."""

from __future__ import annotations

from typing import Any

from kge_torchrec.models.scorers.algebra import AlgebraScorer, cayley_dickson


class QMult(AlgebraScorer):
    """D real numbers a row make D/4 quaternions a + b i + c j + d k, stored (a, b, c, d, a, ...).

    Raises ValueError when D is no multiple of 4.
    """

    name = "qmult"

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, table=cayley_dickson(2), **shared)
