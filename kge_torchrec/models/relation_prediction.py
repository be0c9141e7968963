"""Relation prediction as an auxiliary objective (Chen et al. 2021): -log p(r | h, t).

Shapes: C chunks, b triples a chunk, D numbers per entity, R relation rows (twins included).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kge_torchrec.models.scorers.base import Scorer, Side


def relation_prediction(
    scorer: Scorer, anchor: Tensor, relation: Tensor, target: Tensor, side: Side
) -> Tensor:
    """Cross-entropy of a triple's relation among all relations, given its two entities.

    anchor, target: (C, b, D); relation: (C, b) int64 ids.  Returns (C, b).  With reciprocal
    relations the choice is among relations and twins, and on side "head" the twin is right, as if
    the inverse triples were in the data; else both sides are the same but for dropout.
    """
    scores = scorer.score_relations(anchor, target, side)  # (C, b, R)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    answer, _ = scorer.direct(relation, side)
    return cross_entropy(scores.movedim(-1, 1), answer, reduction="none")
