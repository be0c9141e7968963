"""RESCAL (Nickel et al. 2011): score(h, r, t) = h^T M_r t."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kge_torchrec.models.scorers.base import Side, TrilinearScorer


class RESCAL(TrilinearScorer):
    """Bilinear with a full matrix; a relation's row is M_r, D x D, row by row."""

    name = "rescal"

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, relation_dim=dim * dim, **shared)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return bilinear_query(anchor, relation.unflatten(-1, (self.dim, self.dim)), side)

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return outer(head, tail)


def bilinear_query(anchor: Tensor, matrix: Tensor, side: Side) -> Tensor:
    """h^T M as a vector, or M t: (..., D), (..., D, D) -> (..., D)."""
    if side == "tail":
        return (anchor[..., None, :] @ matrix)[..., 0, :]
    return (matrix @ anchor[..., None])[..., 0]


def outer(head: Tensor, tail: Tensor) -> Tensor:
    """h t^T, row by row: (..., D), (..., D) -> (..., D * D)."""
    return (head[..., None] * tail[..., None, :]).flatten(-2)
