"""Scorers whose numbers live in an algebra: score(h, r, t) = <h r, t> as real vectors.

An algebra over n units u_i is its table: x y = sum_ijk x_i y_j table_ijk u_k.  A row of D real
numbers is D/n numbers of n components each, interleaved as complex numbers are: the components of
the first number, then those of the second.

Shapes: n units, D numbers a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kge_torchrec.models.scorers.base import Side, TrilinearScorer


class AlgebraScorer(TrilinearScorer):
    """Products of numbers, all at once; head, tail and relation queries are its three adjoints."""

    table: Tensor  # (n, n, n)

    def __init__(
        self,
        num_relations: int,
        dim: int,
        reciprocal: bool = False,
        *,
        table: Tensor,
        **shared: Any,
    ):
        super().__init__(num_relations, dim, reciprocal, **shared)
        # Not persistent: a constant is no part of a checkpoint.
        self.register_buffer("table", table.to(self.relations.dtype), persistent=False)

    def relation(self, ids: Tensor) -> Tensor:
        return self.factor(super().relation(ids))

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
