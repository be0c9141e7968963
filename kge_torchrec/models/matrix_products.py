"""Vectors times the matrices of their relations, on a CPU, with dropout of the matrices' numbers.

A batch of queries has a few relations, but torch multiplies with a copy of the matrix for each
query, which dropout reads and writes again, and so does backward.  Here a query reads its
relation's matrix where it lies and draws what is dropped while it multiplies (``dropout_kernels``
says how, and backward draws it again).  Queries of one relation follow each other, so that its
matrix and its gradient stay in the nearer caches.  A relation's gradient has one writer, which adds
queries in their order: any number of threads gives the same bits.

Shapes: Q queries, D numbers a vector, R matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kge_torchrec.models.dropout_kernels import mixed
from kge_torchrec.models.row_sums import JIT, by_row, threads_for

_U = np.uint32
_FAST = JIT | {"fastmath": {"reassoc", "nsz", "contract"}}  # sums may run in vector lanes


def relation_products(
    vectors: Tensor, matrices: Tensor, relation: Tensor, *, left: bool, share: float, key: int
) -> Tensor:
    """x^T M, or M x where not ``left``, float32 and differentiable.

    vectors: (..., D); matrices: (R, D * D), row by row; relation: (...) int64 ids.
    share: of a matrix's numbers, dropped for each query anew as ``dropped`` would drop (Q, D * D)
    with the key; 0 drops none.
    """
    given = vectors.reshape(-1, vectors.shape[-1]), matrices, relation.reshape(-1)
    return _Products.apply(*given, left, share, key).view(vectors.shape)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        matrices: Tensor,
        relation: Tensor,
        left: bool,
        share: float,
        key: int,
    ) -> Tensor:
        work = _Work(vectors, matrices, relation, share, key)
        out = torch.empty_like(work.vectors)
        work.multiply(left, out)
        ctx.save_for_backward(vectors, matrices, relation)
        ctx.settings = left, share, key
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        vectors, matrices, relation = ctx.saved_tensors
        left, share, key = ctx.settings
        work = _Work(vectors, matrices, relation, share, key)
        of_vectors, of_matrices = torch.empty_like(work.vectors), torch.zeros_like(work.matrices)
        work.pull(left, grad.float().contiguous(), of_vectors, of_matrices)
        return of_vectors, of_matrices, None, None, None, None


class _Work:
    """Queries sorted by relation, cut into as many parts of relations as there are threads."""

    def __init__(
        self, vectors: Tensor, matrices: Tensor, relation: Tensor, share: float, key: int
    ) -> None:
        self.vectors = vectors.detach().float().contiguous()
        # Not by .numpy(), after which FSDP could not free them.
        self.matrices = matrices.detach().float().contiguous()
        places, bounds = by_row(relation.numpy(), len(matrices))
        parts = threads_for(len(places), len(places) * matrices.shape[1])
        ends = np.searchsorted(bounds, np.arange(parts + 1) * len(places) / parts)
        ends[0], ends[-1] = 0, len(matrices)
        self.parts = parts
        self.given = (
            places, bounds, ends, share > 0, _U(min(round(share * 2**32), 2**32 - 1)),
            np.float32(1 / (1 - share)), _U(key & 0xFFFFFFFF), _U(key >> 32),
            self.vectors.numpy(), np.from_dlpack(self.matrices),
        )  # fmt: skip

    def multiply(self, *given: Any) -> None:
        """Of ``_multiply``: left, out."""
        self._run(_multiply, _multiply_in_parallel, *given)

    def pull(self, *given: Any) -> None:
        """Of ``_pull``: left, gradients of what ``multiply`` gave, of vectors, of matrices."""
        self._run(_pull, _pull_in_parallel, *given)

    def _run(self, serial: Any, in_parallel: Any, left: bool, *arrays: Tensor) -> None:
        given = *self.given, left, *(x.numpy() for x in arrays)
        if self.parts == 1:
            serial(0, *given)
        else:
            in_parallel(self.parts, *given)


@njit(parallel=True, **JIT)
def _multiply_in_parallel(parts: int, *given: Any) -> None:
    for part in prange(parts):
        _multiply(part, *given)


@njit(parallel=True, **JIT)
def _pull_in_parallel(parts: int, *given: Any) -> None:
    for part in prange(parts):
        _pull(part, *given)


@njit(**_FAST)
def _multiply(
    part: int,
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
    """The products of a part's queries, (Q, D) -> (Q, D)."""
    dim = vectors.shape[1]
    for relation in range(ends[part], ends[part + 1]):
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


@njit(**_FAST)
def _pull(
    part: int,
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
    """The gradients of a part's vectors, written, and matrices, added up."""
    dim = vectors.shape[1]
    for relation in range(ends[part], ends[part + 1]):
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


@njit(inline="always", **JIT)
def _first(query: int, row: int, dim: int, low: np.uint32) -> np.uint32:
    """Where the draws of a row of a query's matrix begin."""
    return _U(_U((query * dim + row) * dim) + low)


@njit(inline="always", **JIT)
def _kept(
    value: np.float32, place: int, draws: bool, first: np.uint32, high: np.uint32, least: np.uint32
) -> np.float32:
    """The value, or 0 if that place after the first is dropped."""
    is_dropped = draws and mixed(_U(mixed(_U(_U(place) + first)) ^ high)) < least
    return value * (np.float32(0) if is_dropped else np.float32(1))  # NaN stays
