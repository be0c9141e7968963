"""OMult (Demir et al. 2021): score(h, r, t) = <h r, t>, octonions."""

from __future__ import annotations

from typing import Any

from kge_torchrec.models.scorers.algebra import AlgebraScorer, cayley_dickson


class OMult(AlgebraScorer):
    """D real numbers a row make D/8 octonions, eight components after another.

    The product is that of QuatE's supplement: pairs of quaternions by Cayley and Dickson's rule.
    Raises ValueError when D is no multiple of 8.
    """

    name = "omult"

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, table=cayley_dickson(3), **shared)
