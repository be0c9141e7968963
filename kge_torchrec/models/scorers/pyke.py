"""Pyke (Demir and Ngonga Ngomo 2019): score(h, r, t) = -(||h - r|| + ||r - t||) / 2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kge_torchrec.models.scorers.base import QueryScorer, Side
from kge_torchrec.models.scorers.distance import euclidean


class Midway(NamedTuple):
    """offset - ||point - row|| / 2"""

    point: Tensor  # (..., D)
    offset: Tensor  # (..., 1)


class Pyke(QueryScorer):
    """Head and tail are drawn to the relation, which lies in the same space of D numbers.

    The paper moves embeddings by forces between co-occurring subjects, predicates and objects,
    without a score; this is the score by which dice-embeddings trains them, without its constant
    margin, which belongs to the loss.  Symmetric in head and tail; tails rank alike for all heads.
    """

    name = "pyke"

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Midway:
        distance = torch.linalg.vector_norm(anchor - relation, dim=-1, keepdim=True)
        return Midway(relation, -distance / 2)

    def similarity(self, query: Midway, rows: Tensor) -> Tensor:
        return query.offset[..., 0] - torch.linalg.vector_norm(query.point - rows, dim=-1) / 2

    def similarity_matrix(self, query: Midway, rows: Tensor) -> Tensor:
        return query.offset - euclidean(query.point, rows) / 2
