"""Scorers in a Clifford algebra: score(h, r, t) = (h r) . t (Demir and Ngonga Ngomo 2023).

A Clifford number here is x_0 + sum_i x_i e_i. The basis vectors e_i anticommute, and their
squares s_i are 1, -1 or 0. The product has a part along 1 and the e_i, which is compared with t,

    (h r)_0 = h_0 r_0 + sum_i s_i h_i r_i,    (h r)_i = h_0 r_i + h_i r_0,

and a part along the e_i e_k, i < k, which t does not have. The score adds the elements
h_i r_k - h_k r_i of the second part directly (the paper's sigma_pp, sigma_qq and sigma_pq).

Shapes: n basis vectors, D elements per row, m = D / (1 + n) Clifford numbers per row.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import NonNegativeInt
from kge_torchrec.kernels.comparisons import InnerProduct, Shifted
from kge_torchrec.models.scorers.algebra import components
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.models.scorers.bilinear import BilinearScorer
from kge_torchrec.models.scorers.layers import Fill


class CliffordScorer(BilinearScorer):
    """An entity row holds m Clifford numbers, stored (x_0, x_1, ..., x_n, x_0, ...)."""

    comparison = Shifted(InnerProduct())
    coefficients: Tensor | None  # factors (n,) of the e_i of head and relation, or none
    is_bilinear = False  # a part of the score does not depend on the answer
    squares: Tensor  # s_i, (n,)
    order: Tensor  # (n, n): sum_i h_i (order r)_i = sum_{i<k} h_i r_k - h_k r_i

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        counts = zip((1.0, -1.0, 0.0), astuple(self.options), strict=False)  # p, q and perhaps r
        squares = [square for square, count in counts for _ in range(count)]
        ones = torch.ones(len(squares), len(squares))
        self.register_buffer("squares", torch.tensor(squares), persistent=False)
        self.register_buffer("order", ones.triu(1) - ones.tril(-1), persistent=False)
        self.register_parameter("coefficients", None)

    @classmethod
    def multiple_of(cls, options: Any) -> int:
        return 1 + sum(astuple(options))

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        (x0, x), (r0, r) = self._parts(anchor), self._scaled(*self._parts(relation))
        if side == "tail":
            x0, x = self._scaled(x0, x)
            first = x0 * r0 + (self.squares * x * r).sum(-1, keepdim=True)
            offset = (x * (r @ self.order.t())).sum((-1, -2))
            return _joined(first, x0 * r + x * r0), offset[..., None]
        first = r0 * x0 + (r * x).sum(-1, keepdim=True)
        rest = self.squares * r * x0 + r0 * x + r @ self.order.t()
        vector = _joined(*self._scaled(first, rest))
        return vector, torch.zeros_like(vector[..., :1])

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        (h0, h), (t0, t) = self._scaled(*self._parts(head)), self._parts(tail)
        first = h0 * t0 + (h * t).sum(-1, keepdim=True)
        rest = self.squares * h * t0 + h0 * t + h @ self.order
        return _joined(*self._scaled(first, rest))

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows into x_0 (..., m, 1) and the x_i (..., m, n)."""
        n = len(self.squares)
        return components(rows, 1 + n).split([1, n], -1)

    def _scaled(self, first: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        return first, rest if self.coefficients is None else rest * self.coefficients


def _joined(first: Tensor, rest: Tensor) -> Tensor:
    return torch.cat([first, rest], -1).flatten(-2)


class CKeci(CliffordScorer):
    """Clifford numbers with p basis vectors of square 1, then q of square -1.

    An entity row holds D / (1 + p + q) of them, with 1 + p + q consecutive elements each.
    p = q = 0 is DistMult; p = 0, q = 1 is ComplEx. dice-embeddings adds sigma_pq only for
    p, q >= 2; this class adds it for p, q >= 1, as in the paper.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of CKeci and Keci."""

        p: NonNegativeInt = 0
        """Number of basis vectors whose square is 1."""
        q: NonNegativeInt = 1
        """Number of basis vectors whose square is -1."""

    name = "ckeci"
    formula = (
        "Keci (Demir and Ngonga Ngomo 2023): score(h, r, t) = (h r) . t in the algebra Cl_{p,q}."
    )

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.is_complex = self.relation_is_complex = self.options == CKeci.Options(p=0, q=1)


class Keci(CKeci):
    """CKeci with a learned factor per basis vector, applied to head and relation.

    The factors are initialized to 0, as in dice-embeddings: at first only the elements along 1
    count.
    """

    name = "keci"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if len(self.squares):
            self.coefficients = nn.Parameter(torch.zeros(len(self.squares)))

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize relation rows from the configured distribution and the factors to 0."""
        super().reset_parameters(fill, stream)
        if self.coefficients is not None:
            self.coefficients.zero_()


class DeCaL(CliffordScorer):
    """Clifford numbers with p basis vectors of square 1, then q of square -1, then r of square 0.

    An entity row holds D / (1 + p + q + r) of them, with 1 + p + q + r consecutive elements each.
    r = 0 is CKeci.
    """

    @dataclass(frozen=True)
    class Options(CKeci.Options):
        """Options of DeCaL."""

        p: NonNegativeInt = 1
        r: NonNegativeInt = 1
        """Number of basis vectors whose square is 0."""

    name = "decal"
    formula = (
        "DeCaL (Kamdem Teyou et al. 2024): score(h, r, t) = (h r) . t in the degenerate Cl_{p,q,r}."
    )
