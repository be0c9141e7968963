"""Keci (Demir and Ngonga Ngomo 2023): score(h, r, t) = (h r) . t in the algebra Cl_{p,q}."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.models.scorers.base import Fill
from kge_torchrec.models.scorers.clifford import CliffordScorer


class CKeci(CliffordScorer):
    """Clifford numbers with p basis vectors of square 1, then q of square -1.

    A row is D / (1 + p + q) of them, 1 + p + q numbers after another.  p = q = 0 is DistMult,
    p = 0, q = 1 is ComplEx.  dice-embeddings adds sigma_pq from p, q >= 2 on only; here it counts
    from p, q >= 1, as in the paper.  Raises ValueError when D is no multiple of 1 + p + q.
    """

    name = "ckeci"

    def __init__(
        self, num_relations: int, dim: int, reciprocal: bool = False, *, p: int = 0, q: int = 1,
        **shared: Any,
    ):  # fmt: skip
        super().__init__(
            num_relations, dim, reciprocal, squares=[1] * p + [-1] * q,
            options={"p": p, "q": q}, **shared,
        )  # fmt: skip
        self.is_complex = self.relation_is_complex = (p, q) == (0, 1)


class Keci(CKeci):
    """CKeci with a learnt factor for each basis vector, applied to head and relation.

    The factors start at 0, as in dice-embeddings: at first only the numbers along 1 count.
    """

    name = "keci"

    def __init__(
        self, num_relations: int, dim: int, reciprocal: bool = False, *, p: int = 0, q: int = 1,
        **shared: Any,
    ):  # fmt: skip
        super().__init__(num_relations, dim, reciprocal, p=p, q=q, **shared)
        self.coefficients = nn.Parameter(torch.zeros(p + q)) if p + q else None

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Relation rows take the configured draw, the factors 0."""
        super().reset_parameters(fill, stream)
        if self.coefficients is not None:
            self.coefficients.zero_()

    def scales(self) -> Tensor | None:
        return self.coefficients
