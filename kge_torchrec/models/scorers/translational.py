"""Scorers that translate or scale a point by the relation and measure its distance to the answer.

Shapes: D elements per entity row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.kernels.comparisons import MinusDistance, OnHyperplane, Shifted
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.models.scorers.layers import Fill, uniform


class TransE(Scorer):
    """Relations are translations of entity vectors: the tail query is h + r, the head query t - r.

    The paper's constraint that entities have length 1 is model.normalization unit.
    """

    start = ("uniform", 0.25)
    is_distance = True
    formula = "TransE (Bordes et al. 2013): score(h, r, t) = -||h + r - t||_p, p = 1 or 2."

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return anchor + relation if side == "tail" else anchor - relation


class TransEL1(TransE):
    """TransE with the Manhattan distance (p = 1). An entity row holds D real numbers."""

    name = "transe_l1"
    comparison = MinusDistance("manhattan")


class TransEL2(TransE):
    """TransE with the Euclidean distance (p = 2). An entity row holds D real numbers."""

    name = "transe_l2"
    comparison = MinusDistance("euclidean")


class TransH(Scorer):
    """Translates entity vectors on a hyperplane per relation.

    A relation row holds the normal w_r (normalized to length 1), then the translation d_r, D
    elements each. The paper penalizes a d_r that leaves the hyperplane; this class projects d_r, so
    the score is minus the squared length of (h + d_r - t)'. The paper's constraint that entities
    have length 1 is model.normalization unit.
    """

    name = "transh"
    relation_vectors = 2
    start = ("uniform", 0.25)
    is_distance = True
    formula = (
        "TransH (Wang et al. 2014): score(h, r, t) = -||h' + d_r' - t'||^2, x' = x - w_r <w_r, x>."
    )
    comparison = OnHyperplane()

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        normal, shift = relation.chunk(2, -1)
        point = anchor + shift if side == "tail" else anchor - shift
        return point, nn.functional.normalize(normal, dim=-1)


class MuRE(Scorer):
    """An entity row holds a vector of D elements, a bias b as a head and a bias c as a tail.

    R_r is diagonal and v_r a translation. The biases are initialized as the vector is (to 0 in the
    authors' code). A relation row holds the diagonal, then the translation.
    """

    name = "mure"
    relation_vectors = 2
    start = ("uniform", 0.25)
    is_distance = True
    formula = "MuRE (Balazevic et al. 2019): score(h, r, t) = -||R_r h - (t + v_r)||^2 + b_h + c_t."
    has_biases = True
    comparison = MinusDistance("scaled_squares")

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize translations as configured, diagonals uniformly in [-1, 1)."""
        super().reset_parameters(fill, stream)
        uniform(self.relations[:, : self.dim], 1.0, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> tuple[Tensor, Tensor | None]:
        scale, shift = relation.chunk(2, -1)
        return (anchor * scale - shift, None) if side == "tail" else (anchor + shift, scale)


class PairRE(Scorer):
    """Scales head and tail elementwise by the relation's two vectors and compares them.

    A relation row holds its vector for heads, then its vector for tails, D elements each. Entity
    rows are used at Euclidean length 1; model.normalization has no effect.
    """

    name = "pairre"
    relation_vectors = 2
    start = ("uniform", 0.25)
    is_distance = True
    formula = (
        "PairRE (Chao et al. 2021): score(h, r, t) = -||h * r_head - t * r_tail||_1, |h| = |t| = 1."
    )
    comparison = MinusDistance("scaled_manhattan")

    def normalized(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(super().normalized(vectors), dim=-1)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        own, other = relation.chunk(2, -1) if side == "tail" else relation.chunk(2, -1)[::-1]
        return anchor * own, other


class Pyke(Scorer):
    """Draws head and tail to the relation, which is a point in the same space of D dimensions.

    The paper has no score: it moves embeddings by forces between co-occurring subjects, predicates
    and objects. This is the training score of dice-embeddings without its constant margin, which
    belongs to the loss. The score is symmetric in head and tail, and the ranking of tails is the
    same for all heads.
    """

    name = "pyke"
    start = ("uniform", 0.25)
    is_distance = True
    formula = "Pyke (Demir and Ngonga Ngomo 2019): score(h, r, t) = -(||h - r|| + ||r - t||) / 2."
    comparison = Shifted(MinusDistance("euclidean"))

    def normalized(self, vectors: Tensor) -> Tensor:
        return super().normalized(vectors) / 2

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        point = relation / 2
        return point, -torch.linalg.vector_norm(anchor - point, dim=-1, keepdim=True)
