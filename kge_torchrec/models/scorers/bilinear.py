"""Scorers that are linear in head, relation and tail: each relation is a (structured) matrix.

Shapes: D elements per entity row, W elements per relation row (MEIM: per partition),
P partitions of C = D / P elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import PositiveInt, Share
from kge_torchrec.kernels.comparisons import Comparison, InnerProduct
from kge_torchrec.kernels.operators import times
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.models.scorers.layers import Dropout, Fill, uniform


class BilinearScorer(Scorer):
    """A scorer that is linear in head, relation and tail; all implement ``relation_query``."""

    comparison: Comparison = InnerProduct()
    is_bilinear = True


class DistMult(BilinearScorer):
    """A diagonal bilinear form, symmetric in head and tail. An entity row holds D real numbers."""

    name = "distmult"
    formula = "DistMult (Yang et al. 2015): score(h, r, t) = sum_d h_d r_d t_d."
    part_size = 1
    multiplies = "real"

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return anchor * relation

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return head * tail


class ComplEx(BilinearScorer):
    """An entity row holds D/2 complex numbers, stored (re, im, re, im, ...).

    Re(x conj(y)) is the inner product of x and y as real vectors, so the tail query is h r and the
    head query t conj(r).
    """

    name = "complex"
    formula = "ComplEx (Trouillon et al. 2016): score(h, r, t) = Re(sum_k h_k r_k conj(t_k))."
    multiple = part_size = 2
    is_complex = relation_is_complex = True
    multiplies = "complex"

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return times(anchor, relation, conjugate=side == "head")

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return times(tail, head, conjugate=True)


class SimplE(BilinearScorer):
    """An entity row holds its vector as a head, then its vector as a tail, D/2 elements each.

    A relation row holds the vector r, then r' of its inverse, D/2 elements each. <x, y, z> is
    sum_k x_k y_k z_k.
    """

    name = "simple"
    multiple = 2
    formula = (
        "SimplE (Kazemi and Poole 2018): score = (<h_head, r, t_tail> + <t_head, r', h_tail>) / 2."
    )

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        (as_head, as_tail), (forth, back) = anchor.chunk(2, -1), relation.chunk(2, -1)
        if side == "tail":
            parts = as_tail * back, as_head * forth
        else:
            parts = as_tail * forth, as_head * back
        return torch.cat(parts, -1) / 2

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        (head_head, head_tail), (tail_head, tail_tail) = head.chunk(2, -1), tail.chunk(2, -1)
        return torch.cat([head_head * tail_tail, tail_head * head_tail], -1) / 2


class RESCAL(BilinearScorer):
    """A bilinear form with a full matrix. A relation row holds M_r, D x D, in row-major order."""

    name = "rescal"
    formula = "RESCAL (Nickel et al. 2011): score(h, r, t) = h^T M_r t."

    @classmethod
    def relation_dim(cls, dim: int, options: Any) -> int:
        return dim * dim

    def query_of_ids(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        """Encode queries; in training on a CPU by one product per relation of the batch.

        Relation dropout then draws once per relation and batch, not for each query.
        """
        # A GPU would wait for the sizes of the groups.
        groups = anchor.device.type == "cpu" and not torch.compiler.is_compiling()
        is_plain = type(self).query is RESCAL.query and not self.input_dropout.p
        if not (self.training and groups and is_plain):
            return self.query(anchor, self.relation(relation), side)
        used, place = relation.unique(return_inverse=True)
        matrices = self.relation(used).unflatten(-1, (self.dim, self.dim))
        flat = anchor.reshape(-1, self.dim), matrices, place.reshape(-1)
        products: Tensor = _RelationProducts.apply(*flat, side == "tail")
        return products.view(anchor.shape)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return bilinear_query(anchor, relation.unflatten(-1, (self.dim, self.dim)), side)

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return outer(head, tail)


class _RelationProducts(torch.autograd.Function):
    """Products of vectors with the matrices of their relations, one product per matrix.

    Copying a matrix for each vector takes several times as long: 128 elements and 512 queries of
    237 relations.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, matrices: Tensor, place: Tensor, left: bool) -> Tensor:
        """Compute x^T M, or M x: vectors (Q, D), matrices (R, D, D), place (Q,) -> (Q, D)."""
        ctx.left, ctx.sizes = left, place.bincount(minlength=len(matrices)).tolist()
        order = place.argsort(stable=True)
        grouped = vectors.index_select(0, order)
        ctx.save_for_backward(grouped, matrices, order)
        return _grouped_products(grouped, matrices if left else matrices.mT, ctx.sizes, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grouped, matrices, order = ctx.saved_tensors
        grads = grad.index_select(0, order)
        back = matrices.mT if ctx.left else matrices
        grad_vectors = _grouped_products(grads, back, ctx.sizes, order)
        grad_matrices = torch.empty_like(matrices)
        rows, columns = (grouped, grads) if ctx.left else (grads, grouped)
        parts = rows.split(ctx.sizes), columns.split(ctx.sizes), grad_matrices
        for row, column, out in zip(*parts, strict=True):
            torch.mm(row.t(), column, out=out)
        return grad_vectors, grad_matrices, None, None


def _grouped_products(grouped: Tensor, matrices: Tensor, sizes: list[int], order: Tensor) -> Tensor:
    """Multiply groups of vectors (Q, D) by a matrix each; return the products in their order."""
    out = torch.empty_like(grouped)
    for x, matrix, y in zip(grouped.split(sizes), matrices, out.split(sizes), strict=True):
        torch.mm(x, matrix, out=y)
    return torch.empty_like(out).index_copy_(0, order, out)


def bilinear_query(anchor: Tensor, matrix: Tensor, side: Side) -> Tensor:
    """Return h^T M for side "tail" or M t for side "head": (..., D), (..., D, D) -> (..., D)."""
    if side == "tail":
        return (anchor[..., None, :] @ matrix)[..., 0, :]
    return (matrix @ anchor[..., None])[..., 0]


def outer(head: Tensor, tail: Tensor) -> Tensor:
    """Return h t^T in row-major order: (..., D), (..., D) -> (..., D * D)."""
    return (head[..., None] * tail[..., None, :]).flatten(-2)


class TuckER(BilinearScorer):
    """Relations share a core tensor (W, D, D): the matrix of a relation is sum_k r_k core_k.

    The authors' BatchNorm of head and query is left out; normalization "layer" is the closest
    substitute.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of TuckER."""

        relation_dim: PositiveInt | None = None
        """Elements per relation row; null: model.dim."""
        feature_dropout: Share = 0.0
        """Dropout probability for the entries of a relation's matrix."""

    name = "tucker"
    formula = "TuckER (Balazevic et al. 2019): score(h, r, t) = core x_1 r x_2 h x_3 t."

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.core = nn.Parameter(torch.empty(self.relations.shape[1], self.dim, self.dim))
        self.feature_dropout = Dropout(self.options.feature_dropout)

    @classmethod
    def relation_dim(cls, dim: int, options: Options) -> int:
        return options.relation_dim or dim

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        super().reset_parameters(fill, stream)
        uniform(self.core, 1.0, stream)  # as in the authors' code

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        matrix = (relation @ self.core.flatten(1)).unflatten(-1, (self.dim, self.dim))
        return bilinear_query(anchor, self.feature_dropout(matrix), side)

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        return outer(head, tail) @ self.core.flatten(1).t()


class MEIM(BilinearScorer):
    """An entity row holds P partitions of C elements; each partition has a TuckER core of its own.

    A relation row holds P partitions of W elements. The matrix of a partition is the sum of its
    slices of the core (P, W, C, C), weighted by the relation. The authors' BatchNorm is left out;
    normalization "layer" is the closest substitute.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of MEIM."""

        partitions: PositiveInt = 4
        """Partitions of an entity row."""
        relation_dim: PositiveInt | None = None
        """Elements per relation and partition; null: as many as per entity and partition."""

    name = "meim"
    formula = (
        "MEIM (Tran and Takasu 2022): score(h, r, t) = sum_k core_k x_1 r_k x_2 h_k x_3 t_k, "
        "partitions k."
    )

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.partitions = self.options.partitions
        width, size = (n // self.partitions for n in (self.relations.shape[1], self.dim))
        self.core = nn.Parameter(torch.empty(self.partitions, width, size, size))

    @classmethod
    def multiple_of(cls, options: Options) -> int:
        return options.partitions

    @classmethod
    def relation_dim(cls, dim: int, options: Options) -> int:
        return options.partitions * (options.relation_dim or dim // options.partitions)

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        super().reset_parameters(fill, stream)
        uniform(self.core, 1.0, stream)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        matrices = torch.einsum("...pw, pwij -> ...pij", self._parts(relation), self.core)
        return bilinear_query(self._parts(anchor), matrices, side).flatten(-2)

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        products = outer(self._parts(head), self._parts(tail))
        return torch.einsum("...pz, pwz -> ...pw", products, self.core.flatten(2)).flatten(-2)

    def _parts(self, rows: Tensor) -> Tensor:
        """View rows as partitions: (..., P n) -> (..., P, n)."""
        return rows.unflatten(-1, (self.partitions, -1))
