"""Scorers over an algebra: score(h, r, t) = <h r, t> as real vectors.

A multiplication table defines an algebra over n units u_i: x y = sum_ijk x_i y_j table_ijk u_k.
An entity row of D elements holds D/n algebra numbers of n components each, number after number:
all components of the first, then all components of the second.

Shapes: n units, D elements per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import NonNegativeInt
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.models.scorers.bilinear import BilinearScorer


class AlgebraScorer(BilinearScorer):
    """Multiplies all algebra numbers of two rows at once.

    Tail, head and relation queries contract the multiplication table over a different axis each.
    """

    table: Tensor  # (n, n, n)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        table = self.table_of(self.options)
        # Not persistent: checkpoints do not store constants.
        self.register_buffer("table", table.to(self.relations.dtype), persistent=False)

    @classmethod
    def table_of(cls, options: Any) -> Tensor:
        """Return the multiplication table of the algebra's units, (n, n, n)."""
        raise NotImplementedError

    def relation(self, ids: Tensor, drop: bool = True) -> Tensor:
        return self.factor(super().relation(ids, drop))

    def factor(self, relation: Tensor) -> Tensor:
        """Map a relation row to the factor that the formula uses: (..., D) -> (..., D).

        The default is the row itself.
        """
        return relation

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        if side == "tail":
            return product(anchor, relation, self.table)
        return _contracted("...mk, ...mj, ijk -> ...mi", anchor, relation, self.table)

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return _contracted("...mi, ...mk, ijk -> ...mj", head, tail, self.table)


def product(x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    """Multiply two rows, algebra number by algebra number: (..., D), (..., D) -> (..., D)."""
    return _contracted("...mi, ...mj, ijk -> ...mk", x, y, table)


def _contracted(pattern: str, x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    x, y = (components(rows, len(table)) for rows in (x, y))
    return torch.einsum(pattern, x, y, table).flatten(-2)


def components(rows: Tensor, units: int) -> Tensor:
    """View rows as algebra numbers: (..., D) -> (..., D/n, n)."""
    return rows.unflatten(-1, (-1, units))


def cayley_dickson(levels: int) -> Tensor:
    """Return the multiplication table after ``levels`` doublings of the real numbers.

    One doubling gives complex numbers, two quaternions, three octonions. Pairs multiply as
    (a, b) (c, d) = (a c - conj(d) b, d a + b conj(c)).
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
    out[n:, n:, :n] = -torch.einsum("ijk, jl -> ilk", swapped, conj)  # conj(d) b, from b and d
    out[:n, n:, n:] = swapped  # d a, from a and d
    out[n:, :n, n:] = torch.einsum("ijk, jl -> ilk", table, conj)  # b conj(c)
    return out


def dual(table: Tensor) -> Tensor:
    """Return the table of pairs a + e b with e e = 0: (a, b) (c, d) = (a c, a d + b c)."""
    n = len(table)
    out = torch.zeros(2 * n, 2 * n, 2 * n)
    out[:n, :n, :n] = out[:n, n:, n:] = out[n:, :n, n:] = table
    return out


class QMult(AlgebraScorer):
    """An entity row holds D/4 quaternions a + b i + c j + d k, stored (a, b, c, d, a, ...)."""

    name = "qmult"
    formula = (
        "QMult (Demir et al. 2021): "
        "score(h, r, t) = <h r, t>, quaternions with the Hamilton product."
    )
    multiple = part_size = 4

    @classmethod
    def table_of(cls, options: Any) -> Tensor:
        return cayley_dickson(2)


class QuatE(QMult):
    """QMult with every quaternion of a relation scaled to length 1, so that relations rotate.

    An entity row holds D/4 quaternions as in QMult.
    """

    name = "quate"
    formula = "QuatE (Zhang et al. 2019): score(h, r, t) = <h (r / |r|), t>, quaternions."

    def factor(self, relation: Tensor) -> Tensor:
        return nn.functional.normalize(components(relation, 4), dim=-1).flatten(-2)


class OMult(AlgebraScorer):
    """An entity row holds D/8 octonions, with eight consecutive components each.

    The product is that of QuatE's supplement: pairs of quaternions by the Cayley-Dickson rule.
    """

    name = "omult"
    multiple = 8
    formula = "OMult (Demir et al. 2021): score(h, r, t) = <h r, t>, octonions."

    @classmethod
    def table_of(cls, options: Any) -> Tensor:
        return cayley_dickson(3)


class DualE(AlgebraScorer):
    """An entity row holds D/8 dual quaternions a + e b, stored as four of a, then four of b.

    A relation c + e d acts as r* = c / |c| + e (d - c <c, d> / |c|^2), a rotation and a
    translation. As in the authors' code, the second part is made orthogonal to the first and is not
    scaled.
    """

    name = "duale"
    multiple = 8
    formula = (
        "DualE (Cao et al. 2021): score(h, r, t) = <h r*, t>, dual quaternions, r* of unit length."
    )

    @classmethod
    def table_of(cls, options: Any) -> Tensor:
        return dual(cayley_dickson(2))

    def factor(self, relation: Tensor) -> Tensor:
        real, other = components(relation, 8).split(4, -1)
        real = nn.functional.normalize(real, dim=-1)
        other = other - real * (real * other).sum(-1, keepdim=True)
        return torch.cat([real, other], -1).flatten(-2)


class LFMult(AlgebraScorer):
    """An entity row holds D / (degree + 1) polynomials as coefficients of 1, x, ..., x^degree.

    The trilinear score of the paper with its exact integral: x^i x^j x^k gives 1 / (1 + i + j + k).
    The score is symmetric in head and tail; degree 0 is DistMult.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of LFMult."""

        degree: NonNegativeInt = 1
        """Degree of the polynomials."""

    name = "lfmult"
    formula = (
        "LFMult (Kamdem Teyou et al. 2024): score(h, r, t) = sum_m int_0^1 h_m(x) r_m(x) t_m(x) dx."
    )

    @classmethod
    def table_of(cls, options: Options) -> Tensor:
        powers = torch.arange(options.degree + 1)
        return 1 / (1 + powers[:, None, None] + powers[:, None] + powers)

    @classmethod
    def multiple_of(cls, options: Options) -> int:
        return options.degree + 1
