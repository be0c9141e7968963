"""DeCaL (Kamdem Teyou et al. 2024): score(h, r, t) = (h r) . t in the degenerate Cl_{p,q,r}."""

from __future__ import annotations

from typing import Any

from kge_torchrec.models.scorers.clifford import CliffordScorer


class DeCaL(CliffordScorer):
    """Clifford numbers with p basis vectors of square 1, then q of square -1, then r of square 0.

    A row is D / (1 + p + q + r) of them, 1 + p + q + r numbers after another; r = 0 is CKeci.
    Raises ValueError when D is no multiple of 1 + p + q + r.
    """

    name = "decal"

    def __init__(
        self, num_relations: int, dim: int, reciprocal: bool = False, *, p: int = 1, q: int = 1,
        r: int = 1, **shared: Any,
    ):  # fmt: skip
        super().__init__(
            num_relations, dim, reciprocal, squares=[1] * p + [-1] * q + [0] * r,
            options={"p": p, "q": q, "r": r}, **shared,
        )  # fmt: skip
