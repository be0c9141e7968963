"""Scorers whose numbers live in an algebra: score(h, r, t) = <h r, t> as real vectors.

    QMult   Demir et al. 2021          <h r, t>, quaternions with the Hamilton product
    QuatE   Zhang et al. 2019          <h (r / |r|), t>, quaternions
    OMult   Demir et al. 2021          <h r, t>, octonions
    DualE   Cao et al. 2021            <h r*, t>, dual quaternions, r* of unit length
    LFMult  Kamdem Teyou et al. 2024   sum_m int_0^1 h_m(x) r_m(x) t_m(x) dx, polynomials

An algebra over n units u_i is its table: x y = sum_ijk x_i y_j table_ijk u_k.  A row of D real
numbers is D/n numbers of n components each, interleaved as complex numbers are: the components of
the first number, then those of the second.

Shapes: n units, D numbers a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import at_least
from kge_torchrec.models.scorers.base import GROUPS, Side
from kge_torchrec.models.scorers.queries import TrilinearScorer


class AlgebraScorer(TrilinearScorer):
    """Products of numbers, all at once; head, tail and relation queries are its three adjoints."""

    table: Tensor  # (n, n, n)

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, **shared)
        table = self.table_of(self.options)
        # Not persistent: a constant is no part of a checkpoint.
        self.register_buffer("table", table.to(self.relations.dtype), persistent=False)

    @classmethod
    def table_of(cls, options: Any) -> Tensor:
        """The products of the algebra's units, (n, n, n)."""
        raise NotImplementedError

    @classmethod
    def multiple(cls, options: Any) -> tuple[int, str]:
        count = len(cls.table_of(options))
        return count, GROUPS[count]

    def relation(self, ids: Tensor, drop: bool = True) -> Tensor:
        return self.factor(super().relation(ids, drop))

    def factor(self, relation: Tensor) -> Tensor:
        """The number that a relation's row stands for: (..., D) -> (..., D), itself by default."""
        return relation

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        if side == "tail":
            return product(anchor, relation, self.table)
        return _contracted("...mk, ...mj, ijk -> ...mi", anchor, relation, self.table)

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return _contracted("...mi, ...mk, ijk -> ...mj", head, tail, self.table)


def product(x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    """x y, number by number: (..., D), (..., D) -> (..., D)."""
    return _contracted("...mi, ...mj, ijk -> ...mk", x, y, table)


def _contracted(pattern: str, x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    x, y = (components(rows, len(table)) for rows in (x, y))
    return torch.einsum(pattern, x, y, table).flatten(-2)


def components(rows: Tensor, units: int) -> Tensor:
    """(..., D) -> (..., D/n, n) view."""
    return rows.unflatten(-1, (-1, units))


def cayley_dickson(levels: int) -> Tensor:
    """The table after so many doublings of the reals: complex numbers, quaternions, octonions.

    Pairs multiply as (a, b) (c, d) = (a c - conj(d) b, d a + b conj(c)).
    """
    table = torch.ones(1, 1, 1)
    for _ in range(levels):
        table = _doubled(table)
    return table


def _doubled(table: Tensor) -> Tensor:
    n = len(table)
    conj = -torch.eye(n)
    conj[0, 0] = 1
    swapped = table.transpose(0, 1)  # y x
    out = torch.zeros(2 * n, 2 * n, 2 * n)
    out[:n, :n, :n] = table  # a c
    out[n:, n:, :n] = -torch.einsum("ijk, jl -> ilk", swapped, conj)  # conj(d) b, of b and d
    out[:n, n:, n:] = swapped  # d a, of a and d
    out[n:, :n, n:] = torch.einsum("ijk, jl -> ilk", table, conj)  # b conj(c)
    return out


def dual(table: Tensor) -> Tensor:
    """The table of pairs a + e b over an algebra, e e = 0: (a, b) (c, d) = (a c, a d + b c)."""
    n = len(table)
    out = torch.zeros(2 * n, 2 * n, 2 * n)
    out[:n, :n, :n] = out[:n, n:, n:] = out[n:, :n, n:] = table
    return out


class QMult(AlgebraScorer):
    """D real numbers a row make D/4 quaternions a + b i + c j + d k, stored (a, b, c, d, a, ...).

    Raises ValueError when D is no multiple of 4.
    """

    name = "qmult"
    formula = (
        "QMult (Demir et al. 2021): "
        "score(h, r, t) = <h r, t>, quaternions with the Hamilton product."
    )

    @classmethod
    def table_of(cls, options: Any) -> Tensor:
        return cayley_dickson(2)


class QuatE(QMult):
    """QMult with every quaternion of a relation at length 1: relations rotate.

    Rows as in QMult.
    """

    name = "quate"
    formula = "QuatE (Zhang et al. 2019): score(h, r, t) = <h (r / |r|), t>, quaternions."

    def factor(self, relation: Tensor) -> Tensor:
        return nn.functional.normalize(components(relation, 4), dim=-1).flatten(-2)


class OMult(AlgebraScorer):
    """D real numbers a row make D/8 octonions, eight components after another.

    The product is that of QuatE's supplement: pairs of quaternions by Cayley and Dickson's rule.
    Raises ValueError when D is no multiple of 8.
    """

    name = "omult"
    formula = "OMult (Demir et al. 2021): score(h, r, t) = <h r, t>, octonions."

    @classmethod
    def table_of(cls, options: Any) -> Tensor:
        return cayley_dickson(3)


class DualE(AlgebraScorer):
    """D real numbers a row make D/8 dual quaternions a + e b, stored as a's four, then b's four.

    A relation c + e d is used as r* = c / |c| + e (d - c <c, d> / |c|^2), a rotation and a
    translation: as in the authors' code the second part is made orthogonal to the first and keeps
    its length.  Raises ValueError when D is no multiple of 8.
    """

    name = "duale"
    formula = (
        "DualE (Cao et al. 2021): score(h, r, t) = <h r*, t>, dual quaternions, r* of unit length."
    )

    @classmethod
    def table_of(cls, options: Any) -> Tensor:
        return dual(cayley_dickson(2))

    @classmethod
    def multiple(cls, options: Any) -> tuple[int, str]:
        return 8, "eight real numbers make a dual quaternion"

    def factor(self, relation: Tensor) -> Tensor:
        real, other = components(relation, 8).split(4, -1)
        real = nn.functional.normalize(real, dim=-1)
        other = other - real * (real * other).sum(-1, keepdim=True)
        return torch.cat([real, other], -1).flatten(-2)


class LFMult(AlgebraScorer):
    """A row is D / (degree + 1) polynomials, each by its coefficients of 1, x, ..., x^degree.

    The trilinear score of the paper, its integral exact: x^i x^j x^k gives 1 / (1 + i + j + k).
    Symmetric in head and tail; degree 0 is DistMult.  Raises ValueError when degree + 1 does not
    divide D.
    """

    @dataclass(frozen=True)
    class Options:
        """The polynomials.

        Args:
            degree: Degree of the polynomials.
        """

        degree: int = 1

        def __post_init__(self) -> None:
            at_least("model.options.degree", self.degree, 0)

    name = "lfmult"
    formula = (
        "LFMult (Kamdem Teyou et al. 2024): score(h, r, t) = sum_m int_0^1 h_m(x) r_m(x) t_m(x) dx."
    )

    @classmethod
    def table_of(cls, options: Options) -> Tensor:
        powers = torch.arange(options.degree + 1)
        return 1 / (1 + powers[:, None, None] + powers[:, None] + powers)

    @classmethod
    def multiple(cls, options: Options) -> tuple[int, str]:
        return options.degree + 1, "degree + 1 coefficients make a polynomial"
