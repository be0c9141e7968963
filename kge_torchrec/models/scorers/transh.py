"""TransH (Wang et al. 2014): score(h, r, t) = -||h' + d_r' - t'||^2, x' = x - w_r <w_r, x>."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from kge_torchrec.models.scorers.base import QueryScorer, Side
from kge_torchrec.models.scorers.pairwise import pairwise


class Projected(NamedTuple):
    """A point and the normal of the hyperplane on which rows are compared with it."""

    point: Tensor  # (..., D)
    normal: Tensor  # (..., D), of length 1


class TransH(QueryScorer):
    """Translations on a hyperplane of each relation.

    A relation's row is its normal w_r (used at length 1), then its translation d_r, D numbers
    each.  Where the paper penalises a d_r that leaves the hyperplane, d_r is projected here: the
    score is minus the squared length of (h + d_r - t)'.  The paper's entities of length 1 are
    model.normalization unit.
    """

    name = "transh"

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, relation_dim=2 * dim, **shared)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Projected:
        normal, shift = relation.chunk(2, -1)
        point = anchor + shift if side == "tail" else anchor - shift
        return Projected(point, nn.functional.normalize(normal, dim=-1))

    def similarity(self, query: Projected, rows: Tensor) -> Tensor:
        return _score(*query, rows)

    def similarity_matrix(self, query: Projected, rows: Tensor) -> Tensor:
        return pairwise(_score, query, [rows], self.dim)


def _score(point: Tensor, normal: Tensor, rows: Tensor) -> Tensor:
    difference = point - rows
    along = (difference * normal).sum(-1, keepdim=True)
    return -(difference - along * normal).square().sum(-1)
