"""DistMult (Yang et al. 2015): score(h, r, t) = sum_d h_d r_d t_d."""

from __future__ import annotations

from torch import Tensor

from kge_torchrec.models.scorers.base import Side, TrilinearScorer


class DistMult(TrilinearScorer):
    """Bilinear with a diagonal relation; symmetric in head and tail.  D real numbers a row."""

    name = "distmult"

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return anchor * relation

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return head * tail
