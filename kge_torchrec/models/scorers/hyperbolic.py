"""A scorer in hyperbolic space, of a curvature that each relation learns.

    RotH  Chami et al. 2020   -d(Rot_r exp_0(h) (+) exp_0(v_r), exp_0(t))^2

Points of the ball of curvature -c are reached from 0 along tangent vectors: exp_0(u) lies in the
direction of u, tanh(|u| sqrt(c)) / sqrt(c) from 0 in the ball, which is 2 |u| by hyperbolic
distance.  x (+) y is Moebius addition, the translation that takes 0 to x applied to y.

Computed on the hyperboloid, the same space in other coordinates: where two points of the ball near
its boundary differ in digits that a float does not have, nothing there is divided by what vanishes.
A point is (1 + m, X), with |X|^2 = (1 + m)^2 - 1; a point of the ball x is

    m = 2 c |x|^2 / (1 - c |x|^2),  X = 2 sqrt(c) x / (1 - c |x|^2)

and two points have

    sinh^2(d sqrt(c) / 2) = (m + n + m n - <X, Y>) / 2

so that all distances of some queries take one matrix product and what is done number by number.

Shapes: C chunks, b queries, K candidates, D numbers a row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from kge_torchrec.kernels.kinds import block_device
from kge_torchrec.models.ops import pairwise, rotated
from kge_torchrec.models.scorers.base import GROUPS, Side
from kge_torchrec.models.scorers.layers import Fill, uniform
from kge_torchrec.models.scorers.queries import QueryScorer

# Tangent vectors end at |u| sqrt(c) = 10, a distance of 20 from 0 where the curvature is -1, so
# that neither a value nor a slope leaves the numbers that a float32 has.
_FARTHEST = 10.0
_SMALLEST = 1e-12  # lengths are no shorter, nor is a sinh^2 smaller: what is divided by them
_STEPS = 16  # numbers of a pair that are in memory at once


class Hyperboloid(NamedTuple):
    """A point, and the root of the curvature of the space in which it is compared."""

    point: Tensor  # (..., D): X
    excess: Tensor  # (..., 1): m
    root: Tensor  # (..., 1): sqrt(c)


class RotH(QueryScorer):
    """D real numbers a row make D/2 complex ones, a vector of the tangent space at 0.

    A relation's row is D/2 phases, D numbers of the translation v_r (a tangent vector as well), and
    a number whose softplus is its curvature c.  Published with model.biases true.  The authors'
    code also translates before it rotates, which their formula does not.  Raises ValueError when D
    is odd or without reciprocal relations: there is no such query for heads.
    """

    name = "roth"
    is_distance = True
    needs_reciprocal = True
    is_complex = True  # entities only
    formula = (
        "RotH (Chami et al. 2020): "
        "score(h, r, t) = -d_c(Rot_r exp_0(h) (+) exp_0(v_r), exp_0(t))^2."
    )

    @classmethod
    def multiple(cls, options: Any) -> tuple[int, str]:
        return 2, GROUPS[2]

    @classmethod
    def relation_dim(cls, dim: int, options: Any) -> int:
        return dim // 2 + dim + 1

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Phases start uniform over the circle, curvatures at softplus(1), as the authors'."""
        super().reset_parameters(fill, stream)
        uniform(self.relations[:, : self.dim // 2], math.pi, stream)
        self.relations[:, -1] = 1

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Hyperboloid:
        phase, shift, curvature = relation.split([self.dim // 2, self.dim, 1], -1)
        root = softplus(curvature).sqrt()
        head, shift = (exponential(x, root) for x in (rotated(anchor, phase), shift))
        return Hyperboloid(*translated(head, shift), root)

    def similarity(self, query: Hyperboloid, rows: Tensor) -> Tensor:
        products = (query.point * rows).sum(-1, keepdim=True)
        return _score(products, query.excess, query.root, _lengths(rows))[..., 0]

    def similarity_matrix(self, query: Hyperboloid, rows: Tensor) -> Tensor:
        # Half the digits would not do for a difference of products.
        with torch.autocast(block_device(rows), enabled=False):
            products = torch.matmul(query.point, rows.transpose(-1, -2))
            lengths = _lengths(rows).transpose(-1, -2)
            each = products, query.excess, query.root
            if torch.compiler.is_compiling():  # one kernel, which keeps nothing of a pair
                return _score(*each, lengths)
            return pairwise(_score, each, [lengths], _STEPS * rows.shape[-2])[..., 0, :]


def exponential(tangent: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """exp_0: vectors (..., D), sqrt(c) (..., 1) -> X (..., D) and m (..., 1)."""
    length = _lengths(tangent)
    sine, excess = _double(root, length)
    return tangent * (sine / length), excess


def translated(by: tuple[Tensor, Tensor], of: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Moebius addition of points (X, m): ``of``, moved as 0 is when it goes to ``by``."""
    (x, m), (y, n) = by, of
    along = (x * y).sum(-1, keepdim=True)
    point = y + x * (1 + n + along / (2 + m))
    # From X, lest it be the difference of large numbers.
    squares = point.square().sum(-1, keepdim=True)
    return point, squares / (1 + (1 + squares).sqrt())


def _lengths(rows: Tensor) -> Tensor:
    """(..., D) -> (..., 1); its gradient at 0 is 0."""
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(_SMALLEST)


def _double(root: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """sinh and cosh - 1 of 2 w, w = root length; w is held at what can be computed."""
    # expm1 is alike wherever a number stands in a tensor, which torch.sinh is not.
    grown = torch.expm1((root * length).clamp_max(_FARTHEST))
    sine = (grown + grown / (grown + 1)) / 2
    excess = 2 * sine.square()
    return 2 * sine * (1 + excess / 2).sqrt(), excess


def _score(products: Tensor, excess: Tensor, root: Tensor, lengths: Tensor) -> Tensor:
    """-d^2 of <X, row>, m and sqrt(c) of queries and |row|, broadcast to each other."""
    sine, other = _double(root, lengths)
    square = (excess + other + excess * other - products * (sine / lengths)) / 2
    square = square.clamp_min(_SMALLEST)
    half = torch.log1p(square.sqrt() + square / (1 + (1 + square).sqrt()))  # arsinh of the root
    return -(2 * half / root).square()
