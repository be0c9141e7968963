"""QuatE (Zhang et al. 2019): score(h, r, t) = <h (r / |r|), t>, quaternions."""

from __future__ import annotations

from torch import Tensor, nn

from kge_torchrec.models.scorers.algebra import components
from kge_torchrec.models.scorers.qmult import QMult


class QuatE(QMult):
    """QMult with every quaternion of a relation at length 1: relations rotate.

    Rows as in QMult.
    """

    name = "quate"

    def factor(self, relation: Tensor) -> Tensor:
        return nn.functional.normalize(components(relation, 4), dim=-1).flatten(-2)
