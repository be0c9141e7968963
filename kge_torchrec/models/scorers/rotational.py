"""Scorers whose relations rotate the entity, by phases or by reflections.

In HousE, H_r is a rotation: a product of Householder reflections x - 2 u <u, x>. P_r and Q_r are
products of Householder projections x - s u <u, x>. The vectors u have length 1, and each block has
vectors of its own.

Shapes: D elements per entity row, k elements per block, B = D / k blocks, P projections per side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from kge_torchrec.config.checks import NonNegativeInt, PositiveInt
from kge_torchrec.kernels.comparisons import Comparison, EachPair, MinusDistance
from kge_torchrec.kernels.library import EPSILON
from kge_torchrec.kernels.operators import rotated
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.models.scorers.layers import Fill, uniform


class RotatE(Scorer):
    """An entity row holds D/2 complex numbers, which a relation rotates by its D/2 phases.

    A rotation keeps distances, so the head query is t e^(-i r).
    """

    name = "rotate"
    multiple, relation_vectors = 2, 0.5
    start = ("uniform", 0.25)
    is_distance = True
    comparison: Comparison = MinusDistance("moduli")
    formula = "RotatE (Sun et al. 2019): score(h, r, t) = -sum_k |h_k e^(i r_k) - t_k|."
    is_complex = True  # only entities: relations are phases

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize phases uniformly over the circle; the configured distribution is not used."""
        uniform(self.relations, math.pi, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return rotated(anchor, relation if side == "tail" else -relation)


class RotatEL2(RotatE):
    """RotatE with the Euclidean length of all differences, as in PyKEEN and LibKGE's l_norm 2.

    In training this is one matrix product; RotatE's sum of moduli needs every pair on its own.
    """

    name = "rotate_l2"
    comparison = MinusDistance("euclidean")
    formula = "RotatE (Sun et al. 2019) by the length: score(h, r, t) = -||h e^(i r) - t||."


class RotE(Scorer):
    """An entity row holds D/2 complex numbers, which a relation rotates, then translates.

    A relation row holds D/2 phases, then the D elements of the translation v_r. The head query is
    Rot_r^-1 (t - v_r). The paper uses model.biases true. The authors store a rotation as a pair of
    elements normalized to length 1; this class stores its phase.
    """

    name = "rote"
    multiple, relation_vectors = 2, 1.5
    is_distance = True
    formula = "RotE (Chami et al. 2020): score(h, r, t) = -||Rot_r h + v_r - t||^2."
    comparison = MinusDistance("squares")
    is_complex = True  # entities only

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize phases uniformly over the circle, translations as configured."""
        super().reset_parameters(fill, stream)
        uniform(self.relations[:, : self.dim // 2], math.pi, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        phase, shift = relation.split([self.dim // 2, self.dim], -1)
        if side == "tail":
            return rotated(anchor, phase) + shift
        return rotated(anchor - shift, -phase)


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """Put blocks side by side, where sums over k are fast: (..., B k) -> (..., k, B)."""
    return rows.unflatten(-1, (-1, block)).mT


def projected(rows: Tensor, vectors: Tensor, scales: Tensor) -> Tensor:
    """Apply projections x - s u <u, x> to rows (..., k, B), the last one first.

    Args:
        rows: (..., k, B).
        vectors: (..., P, k, B), u, of length 1 per block.
        scales: (..., P, 1, B), s.
    """
    if not vectors.shape[-3]:  # torch.export does not load a program with an unbind of nothing
        return rows
    for vector, scale in reversed([*zip(vectors.unbind(-3), scales.unbind(-3), strict=True)]):
        rows = removed(rows, vector, scale)
    return rows


def removed(rows: Tensor, vector: Tensor, scale: float | Tensor) -> Tensor:
    """Return x - scale u <u, x> for each block: (..., k, B); a tensor of scales is (..., 1, B)."""
    return rows - scale * (rows * vector).sum(-2, keepdim=True) * vector


def minus_lengths(point: Tensor, vectors: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Return minus the sum of the lengths of blocks of a point (..., k, B) minus a projected row.

    Args:
        point: (..., k, B).
        vectors: As ``projected`` takes them.
        scales: The same.
        rows: (..., k, B).
    """
    squares = (point - projected(rows, vectors, scales)).square().sum(-2)
    return -(squares + EPSILON).sqrt().sum(-1)  # the gradient of a length is finite at 0


class HousE(Scorer):
    """An entity row holds D/k blocks of k elements.

    A relation row holds vectors, then scales. The vectors have D elements each (one u per block):
    first the reflections, then the projections of heads, then those of tails. The scales s have D/k
    elements per projection: first those of heads, then those of tails. 2 (k // 2) reflections make
    any rotation. projections 0 is the paper's HousE-r. Scales are unbounded; the authors' code
    bounds them.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of HousE."""

        block: PositiveInt = 4
        """Elements per block; each block is rotated on its own."""
        reflections: PositiveInt | None = None
        """Reflections per rotation; null: 2 (block // 2)."""
        projections: NonNegativeInt = 1
        """Projections per side (head and tail); 0 is HousE-r."""

        @property
        def turns(self) -> int:
            """The number of reflections, with null resolved."""
            return 2 * (self.block // 2) if self.reflections is None else self.reflections

    name = "house"
    start = ("uniform", 0.25)
    is_distance = True
    formula = (
        "HousE (Li et al. 2022): "
        "score(h, r, t) = -sum_i ||H_r P_r h_i - Q_r t_i||, blocks of numbers i."
    )

    def __init__(self, *args: Any, **shared: Any):
        super().__init__(*args, **shared)
        options = self.options
        self.block, self.projections = options.block, options.projections
        self.sizes = self.sizes_of(self.dim, options)
        self.comparison = EachPair(
            minus_lengths, lambda rows: in_blocks(rows, self.block).contiguous()
        )

    @classmethod
    def sizes_of(cls, dim: int, options: Options) -> list[int]:
        """Return the sizes of the five parts of a relation row."""
        vectors, scales = options.projections * dim, options.projections * (dim // options.block)
        return [options.turns * dim, vectors, vectors, scales, scales]

    @classmethod
    def relation_dim(cls, dim: int, options: Options) -> int:
        return sum(cls.sizes_of(dim, options))

    @classmethod
    def multiple_of(cls, options: Options) -> int:
        return options.block

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize vectors as configured, scales uniformly in [-0.01, 0.01)."""
        super().reset_parameters(fill, stream)
        uniform(self.relations[:, sum(self.sizes[:3]) :], 0.01, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor]:
        turn, head_vectors, tail_vectors, head_scales, tail_scales = relation.split(self.sizes, -1)
        turns = self._units(turn, self.options.turns).unbind(-3)
        scales = (self.projections, 1, self.dim // self.block)
        heads, tails = (
            (self._units(vectors, self.projections), of_vectors.unflatten(-1, scales))
            for vectors, of_vectors in ((head_vectors, head_scales), (tail_vectors, tail_scales))
        )
        if side == "tail":
            ours, theirs, turns = heads, tails, turns[::-1]
        else:  # a reflection is its own inverse
            ours, theirs = tails, heads
        point = projected(in_blocks(anchor, self.block), *ours)
        for vector in turns:
            point = removed(point, vector, 2.0)
        return point, *theirs

    def _units(self, vectors: Tensor, count: int) -> Tensor:
        """Scale the blocks of vectors to length 1: (..., count D) -> (..., count, k, D / k)."""
        blocks = in_blocks(vectors.unflatten(-1, (count, self.dim)), self.block)
        return nn.functional.normalize(blocks, dim=-2)
