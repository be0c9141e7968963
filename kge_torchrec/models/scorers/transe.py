"""TransE (Bordes et al. 2013): score(h, r, t) = -||h + r - t||_p, p = 1 or 2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kge_torchrec.models.scorers.base import QueryScorer, Side


class TransE(QueryScorer):
    """Relations are translations.  The tail query is h + r, the head query t - r."""

    norm: float

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False):
        super().__init__(num_relations, dim, reciprocal)
        self.relations = nn.Parameter(torch.empty(self.relation_rows, dim))

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        shift = nn.functional.embedding(relation, self.relations)
        return anchor + shift if side == "tail" else anchor - shift

    def similarity(self, query: Tensor, rows: Tensor) -> Tensor:
        return -torch.linalg.vector_norm(query - rows, ord=self.norm, dim=-1)

    def similarity_matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        # The product form of the Euclidean distance loses digits where distances are small, and
        # ranking would then disagree with the scores of single triples.
        exact = "donot_use_mm_for_euclid_dist"
        return -torch.cdist(query, rows, p=self.norm, compute_mode=exact)


class TransEL1(TransE):
    norm = 1.0


class TransEL2(TransE):
    norm = 2.0
