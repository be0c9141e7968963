"""PairRE (Chao et al. 2021): score(h, r, t) = -||h * r_head - t * r_tail||_1, |h| = |t| = 1."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from kge_torchrec.models.scorers.base import QueryScorer, Side
from kge_torchrec.models.scorers.pairwise import pairwise


class Scaled(NamedTuple):
    """-||point - scale * row||_1"""

    point: Tensor  # (..., D)
    scale: Tensor  # (..., D)


class PairRE(QueryScorer):
    """A relation's row is its vector for heads, then that for tails, D numbers each.

    Entities are used at Euclidean length 1, whatever model.normalization says.
    """

    name = "pairre"

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, relation_dim=2 * dim, **shared)

    def entity(self, rows: Tensor) -> Tensor:
        return nn.functional.normalize(super().entity(rows), dim=-1)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Scaled:
        of_head, of_tail = relation.chunk(2, -1)
        if side == "tail":
            return Scaled(anchor * of_head, of_tail)
        return Scaled(anchor * of_tail, of_head)

    def similarity(self, query: Scaled, rows: Tensor) -> Tensor:
        return _score(*query, rows)

    def similarity_matrix(self, query: Scaled, rows: Tensor) -> Tensor:
        return pairwise(_score, query, [rows], self.dim)


def _score(point: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    return -(point - scale * rows).abs().sum(-1)
