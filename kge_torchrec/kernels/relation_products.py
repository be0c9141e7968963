"""Vectors times the matrices of their relations, on a CPU, with dropout of the matrices' numbers.

A batch of queries has a few relations, but torch multiplies with a copy of the matrix for each
query, which dropout reads and writes again, and so does backward.  Here a query reads its
relation's matrix where it lies and draws what is dropped while it multiplies (``dropout``
says how, and backward draws it again).  Queries of one relation follow each other, so that its
matrix and its gradient stay in the nearer caches.  A relation's gradient has one writer, which adds
queries in their order: any number of threads gives the same bits.

Shapes: Q queries, D numbers a vector, R matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.blocks import block_kernel
from kge_torchrec.kernels.dropout import mixed
from kge_torchrec.kernels.jit import FUSED_SUMS, helper, threads_for
from kge_torchrec.kernels.row_sums import by_row

_U = np.uint32


def relation_products(
    vectors: Tensor, matrices: Tensor, relation: Tensor, *, left: bool, share: float, key: int
) -> Tensor:
    """x^T M, or M x where not ``left``, float32 and differentiable.

    vectors: (..., D); matrices: (R, D * D), row by row; relation: (...) int64 ids.
    share: of a matrix's numbers, dropped for each query anew as ``dropped`` would drop (Q, D * D)
    with the key; 0 drops none.
    """
    given = vectors.reshape(-1, vectors.shape[-1]), matrices, relation.reshape(-1)
    return _products(*given, left, share, key).view(vectors.shape)


@torch.library.custom_op("kge_torchrec::relation_products", mutates_args=(), device_types="cpu")
def _products(
    vectors: Tensor, matrices: Tensor, relation: Tensor, left: bool, share: float, key: int
) -> Tensor:
    """Return the products (Q, D) in float32."""
    work = _Work(vectors, matrices, relation, share, key)
    out = torch.empty_like(work.vectors)
    work.multiply(left, out)
    return out


@torch.library.custom_op("kge_torchrec::relation_gradients", mutates_args=(), device_types="cpu")
def _gradients(
    grad: Tensor,
    vectors: Tensor,
    matrices: Tensor,
    relation: Tensor,
    left: bool,
    share: float,
    key: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of vectors and matrices in float32; grad: (Q, D), of the products."""
    work = _Work(vectors, matrices, relation, share, key)
    of_vectors, of_matrices = torch.empty_like(work.vectors), torch.zeros_like(work.matrices)
    work.pull(left, grad.detach().float().contiguous(), of_vectors, of_matrices)
    return of_vectors, of_matrices


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)


_products.register_fake(lambda vectors, *_: _like(vectors))
_gradients.register_fake(lambda grad, vectors, matrices, *_: (_like(vectors), _like(matrices)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, left, share, key = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = left, share, key


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


_products.register_autograd(_backward, setup_context=_keep)


class _Work:
    """Queries sorted by relation, cut into as many parts of relations as there are threads."""

    def __init__(
        self, vectors: Tensor, matrices: Tensor, relation: Tensor, share: float, key: int
    ) -> None:
        self.vectors = vectors.detach().float().contiguous()
        # Not by .numpy(), after which FSDP could not free them.
        self.matrices = matrices.detach().float().contiguous()
        places, bounds = by_row(relation.numpy(), len(matrices))
        work = len(places) * matrices.shape[1]
        parts = threads_for(len(places), work)
        ends = np.searchsorted(bounds, np.arange(parts + 1) * len(places) / parts)
        ends[0], ends[-1] = 0, len(matrices)
        self.parts, self.work = parts, work
        self.given = (
            places, bounds, ends, share > 0, _U(min(round(share * 2**32), 2**32 - 1)),
            np.float32(1 / (1 - share)), _U(key & 0xFFFFFFFF), _U(key >> 32),
            self.vectors.numpy(), np.from_dlpack(self.matrices),
        )  # fmt: skip

    def multiply(self, left: bool, out: Tensor) -> None:
        """Write the products."""
        _multiply(self.parts, self.work, *self.given, left, out.numpy())

    def pull(self, left: bool, grad: Tensor, of_vectors: Tensor, of_matrices: Tensor) -> None:
        """Write the gradients of vectors and add those of matrices; grad: of the products."""
        grads = (x.numpy() for x in (grad, of_vectors, of_matrices))
        _pull(self.parts, self.work, *self.given, left, *grads)


@block_kernel(1, fastmath=FUSED_SUMS)
def _multiply(
    start: int,
    stop: int,
    places: np.ndarray,
    bounds: np.ndarray,
    ends: np.ndarray,
    draws: bool,
    least: np.uint32,
    scale: np.float32,
    low: np.uint32,
    high: np.uint32,
    vectors: np.ndarray,
    matrices: np.ndarray,
    left: bool,
    out: np.ndarray,
) -> None:
    """The products of the queries of some parts, (Q, D) -> (Q, D)."""
    dim = vectors.shape[1]
    for relation in range(ends[start], ends[stop]):
        matrix = matrices[relation]
        for query in places[bounds[relation] : bounds[relation + 1]]:
            x, y = vectors[query], out[query]
            if left:
                y[:] = np.float32(0)
            for i in range(dim):
                row = matrix[i * dim : (i + 1) * dim]
                first = _first(query, i, dim, low)
                if left:
                    a = x[i] * scale
                    for j in range(dim):
                        y[j] += a * _kept(row[j], j, draws, first, high, least)
                else:
                    total = np.float32(0)
                    for j in range(dim):
                        total += x[j] * _kept(row[j], j, draws, first, high, least)
                    y[i] = total * scale


@block_kernel(1, fastmath=FUSED_SUMS)
def _pull(
    start: int,
    stop: int,
    places: np.ndarray,
    bounds: np.ndarray,
    ends: np.ndarray,
    draws: bool,
    least: np.uint32,
    scale: np.float32,
    low: np.uint32,
    high: np.uint32,
    vectors: np.ndarray,
    matrices: np.ndarray,
    left: bool,
    grad: np.ndarray,
    of_vectors: np.ndarray,
    of_matrices: np.ndarray,
) -> None:
    """The gradients of the vectors of some parts, written, and matrices, added up."""
    dim = vectors.shape[1]
    for relation in range(ends[start], ends[stop]):
        matrix, of_matrix = matrices[relation], of_matrices[relation]
        for query in places[bounds[relation] : bounds[relation + 1]]:
            # Whichever side x is on, a row of M meets one number of one and all of the other.
            x, g, of_x = vectors[query], grad[query], of_vectors[query]
            if not left:
                of_x[:] = np.float32(0)
            for i in range(dim):
                row = matrix[i * dim : (i + 1) * dim]
                of_row = of_matrix[i * dim : (i + 1) * dim]
                first = _first(query, i, dim, low)
                if left:
                    a, total = x[i] * scale, np.float32(0)
                    for j in range(dim):
                        b = _kept(g[j], j, draws, first, high, least)
                        total += row[j] * b
                        of_row[j] += a * b
                    of_x[i] = total * scale
                else:
                    a = g[i] * scale
                    for j in range(dim):
                        b = _kept(a, j, draws, first, high, least)
                        of_x[j] += row[j] * b
                        of_row[j] += x[j] * b


@helper
def _first(query: int, row: int, dim: int, low: np.uint32) -> np.uint32:
    """Where the draws of a row of a query's matrix begin."""
    return _U(_U((query * dim + row) * dim) + low)


@helper
def _kept(
    value: np.float32, place: int, draws: bool, first: np.uint32, high: np.uint32, least: np.uint32
) -> np.float32:
    """The value, or 0 if that place after the first is dropped."""
    is_dropped = draws and mixed(_U(mixed(_U(_U(place) + first)) ^ high)) < least
    return value * (np.float32(0) if is_dropped else np.float32(1))  # NaN stays
