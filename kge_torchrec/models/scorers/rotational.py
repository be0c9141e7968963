"""Scorers whose relations rotate the entity, by phases or by reflections.

Their score(h, r, t):

    RotatE  Sun et al. 2019    -sum_k |h_k e^(i r_k) - t_k|, or -||h e^(i r) - t||
    RotE    Chami et al. 2020  -||Rot_r h + v_r - t||^2, Rot_r as in RotatE
    HousE   Li et al. 2022     -sum_i ||H_r P_r h_i - Q_r t_i||, blocks of numbers i

In HousE H_r is a rotation, a product of Householder reflections x - 2 u <u, x>; P_r and Q_r are
products of Householder projections x - s u <u, x>.  The vectors u have length 1; each block has its
own.

Shapes: k numbers a block, D numbers a row, m projections on either side, n reflections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import at_least
from kge_torchrec.models.distances import (
    compared_at,
    complex_distance,
    euclidean,
    has_kernels,
    squares_by_products,
)
from kge_torchrec.models.ops import pairwise, rotated
from kge_torchrec.models.scorers.base import GROUPS, Side
from kge_torchrec.models.scorers.layers import Fill, uniform
from kge_torchrec.models.scorers.queries import EuclideanScorer, QueryScorer


class RotatE(QueryScorer):
    """Relations are rotations of D/2 complex numbers; a relation row holds D/2 phases.

    A rotation keeps distances, so the head query is t e^(-i r).  Raises ValueError when D is odd.
    """

    name = "rotate"
    start = ("uniform", 0.25)
    is_distance = True
    entity_metric = "moduli"
    formula = "RotatE (Sun et al. 2019): score(h, r, t) = -sum_k |h_k e^(i r_k) - t_k|."
    is_complex = True  # entities only: relations are phases

    @classmethod
    def multiple(cls, options: Any) -> tuple[int, str]:
        return 2, GROUPS[2]

    @classmethod
    def relation_dim(cls, dim: int, options: Any) -> int:
        return dim // 2

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Phases start uniform over the circle: the configured distribution plays no part."""
        uniform(self.relations, math.pi, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return rotated(anchor, relation if side == "tail" else -relation)

    def similarity(self, query: Tensor, rows: Tensor) -> Tensor:
        # 1e-12 keeps the gradient of |x| finite at x = 0.
        squares = (query - rows).unflatten(-1, (-1, 2)).square().sum(-1)
        return -(squares + 1e-12).sqrt().sum(-1)

    def similarity_matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        return -complex_distance(query, rows)

    def similarity_at(self, query: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        return -compared_at("moduli", query, rows, index)


class RotatEL2(EuclideanScorer, RotatE):
    """RotatE by the Euclidean length of all differences, as PyKEEN has it (LibKGE's l_norm 2).

    Where the moduli are summed every pair is worked through; this is a matrix product in training.
    """

    name = "rotate_l2"
    formula = "RotatE (Sun et al. 2019) by the length: score(h, r, t) = -||h e^(i r) - t||."


class RotE(QueryScorer):
    """D real numbers a row make D/2 complex ones, which a relation rotates, then moves.

    A relation's row is D/2 phases, then D numbers of the translation v_r; the head query is
    Rot_r^-1 (t - v_r).  Published with model.biases true.  The authors hold a rotation as a pair of
    numbers that they bring to length 1, not as its phase.  Raises ValueError when D is odd.
    """

    name = "rote"
    is_distance = True
    formula = "RotE (Chami et al. 2020): score(h, r, t) = -||Rot_r h + v_r - t||^2."
    is_complex = True  # entities only

    @classmethod
    def multiple(cls, options: Any) -> tuple[int, str]:
        return 2, GROUPS[2]

    @classmethod
    def relation_dim(cls, dim: int, options: Any) -> int:
        return dim // 2 + dim

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Translations take the configured draw, phases start uniform over the circle."""
        super().reset_parameters(fill, stream)
        uniform(self.relations[:, : self.dim // 2], math.pi, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        phase, shift = relation.split([self.dim // 2, self.dim], -1)
        if side == "tail":
            return rotated(anchor, phase) + shift
        return rotated(anchor - shift, -phase)

    def similarity(self, query: Tensor, rows: Tensor) -> Tensor:
        return -(query - rows).square().sum(-1)

    def similarity_matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        return -euclidean(query, rows).square()

    def similarity_in_training(self, query: Tensor, rows: Tensor) -> Tensor:
        return squares_by_products(query, rows)

    def similarity_at(self, query: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        return -compared_at("euclidean", query, rows, index).square()


class Projected(NamedTuple):
    """A point, and the projections that rows go through before they are compared with it."""

    point: Tensor  # (..., D)
    vectors: Tensor  # (..., m D), of length 1 block by block
    scales: Tensor  # (..., m D / k)


class HousE(QueryScorer):
    """An entity's row is D/k blocks of k numbers.

    A relation's row holds, for every reflection, then for every projection of heads, then of tails,
    D numbers (a vector u for each block); after them the scales s of heads, then of tails, D/k for
    each projection.  block: k.  reflections: n; None takes 2 (k // 2), which make any rotation.
    projections: m; 0 is the paper's HousE-r.  Scales are free; the authors' code bounds them.

    Raises ValueError when k does not divide D.
    """

    @dataclass(frozen=True)
    class Options:
        """The rotations.

        Args:
            block: Numbers that are rotated together.
            reflections: Reflections that make a rotation; null takes 2 (block // 2).
            projections: Projections of head and tail; 0 is HousE-r.
        """

        block: int = 4
        reflections: Optional[int] = None  # noqa: UP045 - jsonargparse on Python 3.10
        projections: int = 1

        def __post_init__(self) -> None:
            at_least("model.options.block", self.block, 1)
            if self.reflections is not None:
                at_least("model.options.reflections", self.reflections, 1)
            at_least("model.options.projections", self.projections, 0)

        @property
        def turns(self) -> int:
            """Reflections, null replaced."""
            return 2 * (self.block // 2) if self.reflections is None else self.reflections

    name = "house"
    start = ("uniform", 0.25)
    is_distance = True
    formula = (
        "HousE (Li et al. 2022): "
        "score(h, r, t) = -sum_i ||H_r P_r h_i - Q_r t_i||, blocks of numbers i."
    )

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, **shared)
        options = self.options
        self.block, self.reflections = options.block, options.turns
        self.projections = options.projections
        self.sizes = self.sizes_of(dim, options)

    @classmethod
    def sizes_of(cls, dim: int, options: Options) -> list[int]:
        """Of the parts of a relation's row."""
        vectors, scales = options.projections * dim, options.projections * (dim // options.block)
        return [options.turns * dim, vectors, vectors, scales, scales]

    @classmethod
    def relation_dim(cls, dim: int, options: Options) -> int:
        return sum(cls.sizes_of(dim, options))

    @classmethod
    def multiple(cls, options: Options) -> tuple[int, str]:
        return options.block, "model.options.block numbers are rotated together"

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Vectors take the configured draw; scales start uniform in [-0.01, 0.01)."""
        super().reset_parameters(fill, stream)
        uniform(self.relations[:, sum(self.sizes[:3]) :], 0.01, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Projected:
        turn, of_head, of_tail, head_scales, tail_scales = relation.split(self.sizes, -1)
        turn, of_head, of_tail = (self._unit(vectors) for vectors in (turn, of_head, of_tail))
        turns = self._each(turn, self.reflections)
        if side == "tail":
            point, turns = self.project(anchor, of_head, head_scales), turns[::-1]
            rest = of_tail, tail_scales
        else:  # a reflection undoes itself
            point = self.project(anchor, of_tail, tail_scales)
            rest = of_head, head_scales
        for vector in turns:
            point = self._along(point, vector, 2.0)
        return Projected(point, *rest)

    def similarity(self, query: Projected, rows: Tensor) -> Tensor:
        return self._score(*query, rows)

    def similarity_matrix(self, query: Projected, rows: Tensor) -> Tensor:
        if has_kernels(rows) and not torch.compiler.is_compiling():
            return self._by_kernels(query, rows)
        return pairwise(self._score, query, [rows], (1 + self.projections) * self.dim)

    def similarity_at(self, query: Projected, rows: Tensor, index: Tensor) -> Tensor:
        if has_kernels(rows) and not torch.compiler.is_compiling():
            return self._by_kernels(query, rows, index)
        return super().similarity_at(query, rows, index)

    def _by_kernels(self, query: Projected, rows: Tensor, index: Tensor | None = None) -> Tensor:
        from kge_torchrec.kernels.projected_distances import (
            projected_distances,  # numba loads slowly
        )

        return -projected_distances(*query, rows, self.block, index)

    def project(self, rows: Tensor, vectors: Tensor, scales: Tensor) -> Tensor:
        """The projections of rows, the last one first: (..., D) -> (..., D)"""
        count = self.projections
        each = zip(self._each(vectors, count), self._each(scales, count), strict=True)
        for vector, scale in reversed(list(each)):
            rows = self._along(rows, vector, scale[..., None])
        return rows

    def _score(self, point: Tensor, vectors: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
        difference = self._blocks(point - self.project(rows, vectors, scales))
        # 1e-12 keeps the gradient of a length finite at 0.
        return -(difference.square().sum(-1) + 1e-12).sqrt().sum(-1)

    def _along(self, rows: Tensor, vector: Tensor, scale: float | Tensor) -> Tensor:
        """x - scale u <u, x>, block by block; scale: (..., D/k, 1) or a number."""
        rows, vector = self._blocks(rows), self._blocks(vector)
        return (rows - scale * (rows * vector).sum(-1, keepdim=True) * vector).flatten(-2)

    def _blocks(self, rows: Tensor) -> Tensor:
        """(..., D) -> (..., D/k, k)"""
        return rows.unflatten(-1, (-1, self.block))

    def _unit(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(self._blocks(vectors), dim=-1).flatten(-2)

    @staticmethod
    def _each(parts: Tensor, count: int) -> list[Tensor]:
        """The count equal parts of the last axis."""
        return list(parts.chunk(count, -1)) if count else []
