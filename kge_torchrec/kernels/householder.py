"""HousE's comparison: rows are projected by the query before their distance is measured.

A Householder projection maps each block x of a row to x - s u <u, x>. With |u| = 1 and s = 2 it is
a reflection.

Shapes: C chunks, b queries, K candidates, U rows, D elements per row in blocks of k elements,
P projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kge_torchrec.kernels.comparisons import Comparison, Index
from kge_torchrec.kernels.library import EPSILON, has_pair_kernels
from kge_torchrec.kernels.operators import pairwise, pick


class ProjectedQuery(NamedTuple):
    """A point, and the projections that are applied to rows before the comparison."""

    point: Tensor  # (..., D)
    vectors: Tensor  # (..., P D), of length 1 per block
    scales: Tensor  # (..., P D/k)


def projected(rows: Tensor, vectors: Tensor, scales: Tensor, block: int) -> Tensor:
    """Apply P projections to rows, the last one first: (..., D) -> (..., D).

    Args:
        rows: (..., D).
        vectors: (..., P D), of length 1 per block.
        scales: (..., P D/k).
        block: k, elements per block.
    """
    blocks = rows.shape[-1] // block
    count = scales.shape[-1] // blocks
    if not count:
        return rows
    pairs = zip(vectors.chunk(count, -1), scales.chunk(count, -1), strict=True)
    for vector, scale in reversed(list(pairs)):
        rows = removed(rows, vector, scale[..., None], block)
    return rows


def removed(rows: Tensor, vector: Tensor, scale: float | Tensor, block: int) -> Tensor:
    """Return x - scale u <u, x> per block: (..., D); scale is (..., D/k, 1) or a float."""
    x, u = (part.unflatten(-1, (-1, block)) for part in (rows, vector))
    return (x - scale * (x * u).sum(-1, keepdim=True) * u).flatten(-2)


@dataclass(frozen=True)
class MinusProjected(Comparison):
    """Minus the sum over blocks of the distance between a point and a projected row."""

    block: int

    def pairs(self, query: ProjectedQuery, rows: Tensor) -> Tensor:
        return self._score(*query, rows)

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        if has_pair_kernels(rows) and not torch.compiler.is_compiling():
            from kge_torchrec.kernels.projected_distances import (
                projected_distances,  # numba loads slowly
            )

            point, vectors, scales = query
            return -projected_distances(point, vectors, scales, rows, self.block, index)
        rows = rows if index is None else pick(rows, index)
        width = rows.shape[-1] + query[1].shape[-1]
        return pairwise(self._score, query, [rows], width)

    def _score(self, point: Tensor, vectors: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
        difference = point - projected(rows, vectors, scales, self.block)
        squares = difference.unflatten(-1, (-1, self.block)).square().sum(-1)
        return -(squares + EPSILON).sqrt().sum(-1)  # the gradient of a length is finite at 0
