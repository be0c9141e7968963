"""LFMult (Kamdem Teyou et al. 2024): score(h, r, t) = sum_m int_0^1 h_m(x) r_m(x) t_m(x) dx."""

from __future__ import annotations

from typing import Any

import torch

from kge_torchrec.models.scorers.algebra import AlgebraScorer


class LFMult(AlgebraScorer):
    """A row is D / (degree + 1) polynomials, each by its coefficients of 1, x, ..., x^degree.

    The trilinear score of the paper, its integral exact: x^i x^j x^k gives 1 / (1 + i + j + k).
    Symmetric in head and tail; degree 0 is DistMult.  Raises ValueError when degree + 1 does not
    divide D.
    """

    name = "lfmult"

    def __init__(
        self, num_relations: int, dim: int, reciprocal: bool = False, *, degree: int = 1,
        **shared: Any,
    ):  # fmt: skip
        powers = torch.arange(degree + 1)
        table = 1 / (1 + powers[:, None, None] + powers[:, None] + powers)
        super().__init__(
            num_relations, dim, reciprocal, table=table, options={"degree": degree}, **shared
        )
