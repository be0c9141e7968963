"""A scorer in hyperbolic space with a learned curvature per relation.

exp_0 maps tangent vectors at 0 to points of the ball of curvature -c: exp_0(u) has the direction
of u and lies at tanh(|u| sqrt(c)) / sqrt(c) from 0 in the ball, a hyperbolic distance of 2 |u|.
x (+) y is Moebius addition: y moved by the translation that takes 0 to x.

The code uses the hyperboloid, whose formulas keep their digits near the boundary of the ball. A
point is (1 + m, X) with |X|^2 = (1 + m)^2 - 1. A point x of the ball becomes

    m = 2 c |x|^2 / (1 - c |x|^2),  X = 2 sqrt(c) x / (1 - c |x|^2)

and the distance d of two points follows from one matrix product for all pairs,

    sinh^2(d sqrt(c) / 2) = (m + n + m n - <X, Y>) / 2

Shapes: C chunks, b queries, K candidates, D elements per row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from kge_torchrec.kernels.comparisons import Comparison, Index, products
from kge_torchrec.kernels.operators import block_device, pairwise, pick, rotated
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.models.scorers.layers import Fill, uniform

# Tangent vectors are clamped at |u| sqrt(c) = 10 (a distance of 20 from 0 for curvature -1), so
# that values and gradients stay within float32's range.
_FARTHEST = 10.0
_SMALLEST = 1e-12  # lower bound for lengths and sinh^2, which are divisors
_STEPS = 16  # elements per pair that are in memory at once


class MinusSquaredDistance(Comparison):
    """Minus the squared hyperbolic distance of a point and the tangent vector of a row.

    The query is (X (..., D), m (..., 1), sqrt(c) (..., 1)).
    """

    def pairs(self, query: Any, rows: Tensor) -> Tensor:
        point, excess, root = query
        inner = (point * rows).sum(-1, keepdim=True)
        return _score(inner, excess, root, _lengths(rows))[..., 0]

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        point, excess, root = query
        rows = pick(rows, index)
        # The score is a difference of products, which needs full precision.
        with torch.autocast(block_device(rows), enabled=False):
            inputs = products(point, rows), excess, root
            lengths = _lengths(rows).transpose(-1, -2)
            width = _STEPS * rows.shape[-2]
            return pairwise(_score, inputs, [lengths], width)[..., 0, :]


class RotH(Scorer):
    """An entity row holds D/2 complex numbers, a vector of the tangent space at 0.

    A relation row holds D/2 phases, D elements of the translation v_r (also a tangent vector), and
    one element whose softplus is the curvature c. The paper uses model.biases true. The authors'
    code also translates before it rotates; their formula does not. Answers tail queries only.
    """

    name = "roth"
    multiple = 2
    comparison = MinusSquaredDistance()
    is_distance = True
    needs_reciprocal = True
    is_complex = True  # entities only
    formula = (
        "RotH (Chami et al. 2020): "
        "score(h, r, t) = -d_c(Rot_r exp_0(h) (+) exp_0(v_r), exp_0(t))^2."
    )

    @classmethod
    def relation_dim(cls, dim: int, options: Any) -> int:
        return dim // 2 + dim + 1

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize phases uniformly over the circle and, as the authors do, c to softplus(1)."""
        super().reset_parameters(fill, stream)
        uniform(self.relations[:, : self.dim // 2], math.pi, stream)
        self.relations[:, -1] = 1

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor]:
        phase, shift, curvature = relation.split([self.dim // 2, self.dim, 1], -1)
        root = softplus(curvature).sqrt()
        head, shift = (exponential(x, root) for x in (rotated(anchor, phase), shift))
        return *translated(head, shift), root


def exponential(tangent: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Apply exp_0: vectors (..., D), sqrt(c) (..., 1) -> X (..., D) and m (..., 1)."""
    length = _lengths(tangent)
    sine, excess = _double(root, length)
    return tangent * (sine / length), excess


def translated(by: tuple[Tensor, Tensor], of: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the Moebius sum of two points (X, m): ``of`` moved as 0 moves to ``by``."""
    (x, m), (y, n) = by, of
    inner = (x * y).sum(-1, keepdim=True)
    point = y + x * (1 + n + inner / (2 + m))
    # Compute m from X, to avoid a difference of large numbers.
    squares = point.square().sum(-1, keepdim=True)
    return point, squares / (1 + (1 + squares).sqrt())


def _lengths(rows: Tensor) -> Tensor:
    """Return Euclidean lengths with gradient 0 at 0: (..., D) -> (..., 1)."""
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(_SMALLEST)


def _double(root: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Return sinh and cosh - 1 of 2 w, with w = root * length clamped to a computable range."""
    # Unlike torch.sinh, expm1 does not depend on the position of an element in the tensor.
    grown = torch.expm1((root * length).clamp_max(_FARTHEST))
    sine = (grown + grown / (grown + 1)) / 2
    excess = 2 * sine.square()
    return 2 * sine * (1 + excess / 2).sqrt(), excess


def _score(products: Tensor, excess: Tensor, root: Tensor, lengths: Tensor) -> Tensor:
    """Return -d^2 from <X, row>, m and sqrt(c) of queries and |row|, broadcast to each other."""
    sine, other = _double(root, lengths)
    square = (excess + other + excess * other - products * (sine / lengths)) / 2
    square = square.clamp_min(_SMALLEST)
    half = torch.log1p(square.sqrt() + square / (1 + (1 + square).sqrt()))  # arsinh(sqrt(square))
    return -(2 * half / root).square()
