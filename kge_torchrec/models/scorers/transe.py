"""TransE (Bordes et al. 2013): score(h, r, t) = -||h + r - t||_p, p = 1 or 2."""

from __future__ import annotations

import torch
from torch import Tensor

from kge_torchrec.models.scorers.base import QueryScorer, Side
from kge_torchrec.models.scorers.distance import euclidean, manhattan


class TransE(QueryScorer):
    """Relations are translations.  The tail query is h + r, the head query t - r.

    The paper's entities of length 1 are model.normalization unit.
    """

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return anchor + relation if side == "tail" else anchor - relation


class TransEL1(TransE):
    name = "transe_l1"

    def similarity(self, query: Tensor, rows: Tensor) -> Tensor:
        return -torch.linalg.vector_norm(query - rows, ord=1, dim=-1)

    def similarity_matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        return -manhattan(query, rows)


class TransEL2(TransE):
    name = "transe_l2"

    def similarity(self, query: Tensor, rows: Tensor) -> Tensor:
        return -torch.linalg.vector_norm(query - rows, dim=-1)

    def similarity_matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        return -euclidean(query, rows)
