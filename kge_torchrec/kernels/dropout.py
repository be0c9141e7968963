"""Dropout on a CPU: of the elements of a tensor, and of the matrices of relations in a product.

torch draws one number after another there, which takes longer than the product that the draw is
for, and keeps a mask for backward. Here the draw is a hash of a key and of the element's position,
so that backward draws it again. The key comes from torch's generator, one per call.

**Products with the matrices of relations.** A batch of queries has a few relations, but torch
multiplies with a copy of the matrix for each query, which dropout reads and writes again, and so
does backward. Here a query reads its relation's matrix in place and draws while it multiplies.
Queries of one relation follow each other, so that its matrix and its gradient stay in the nearer
caches. A relation's gradient has one writer, which adds queries in their order: any number of
threads gives the same bits.

Shapes: Q queries, D elements per vector, R matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.jit import FUSED_SUMS, block_kernel, helper, threads_for
from kge_torchrec.kernels.library import operator
from kge_torchrec.kernels.rows import by_row

_CHUNK = 1 << 14  # elements
_U = np.uint32


def draw_arguments(share: float, key: int) -> tuple[Any, ...]:
    """Return the threshold of a draw, the factor of kept elements and the halves of the key."""
    threshold = _U(min(round(share * 2**32), 2**32 - 1))
    return threshold, np.float32(1 / (1 - share)), _U(key & 0xFFFFFFFF), _U(key >> 32)


def _dropped(values: Tensor, share: float, key: int) -> Tensor:
    """Set each element to 0 with probability ``share``, else divide it by 1 - ``share``.

    Args:
        values: (...) float32.
        share: Dropout probability.
        key: 62 bits; the dropped elements depend on the key and their positions only.
    """
    values = values.detach().contiguous()
    out = torch.empty_like(values)
    flat = values.view(-1).numpy(), out.view(-1).numpy()
    _drop(values.numel(), values.numel(), *flat, *draw_arguments(share, key))
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.share, ctx.key = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """Drop gradients where elements were dropped: the draw is the same hash."""
    return dropped(grad, ctx.share, ctx.key), None, None


dropped = operator(
    "dropped",
    _dropped,
    lambda values, share, key: torch.empty_like(values).contiguous(),
    save=_save,
    backward=_backward,
)


@block_kernel(_CHUNK)
def _drop(
    start: int,
    stop: int,
    values: np.ndarray,
    out: np.ndarray,
    threshold: np.uint32,
    scale: np.float32,
    low: np.uint32,
    high: np.uint32,
) -> None:
    for place in range(start, stop):
        drawn = mixed(_U(mixed(_U(_U(place) + low)) ^ high))
        out[place] = values[place] * (scale if drawn >= threshold else np.float32(0))


@helper
def mixed(bits: np.uint32) -> np.uint32:
    """Mix bits by a bijection (Wellons' lowbias32): every bit depends on every bit."""
    bits = _U(bits ^ (bits >> _U(16)))
    bits = _U(bits * _U(0x7FEB352D))
    bits = _U(bits ^ (bits >> _U(15)))
    bits = _U(bits * _U(0x846CA68B))
    return _U(bits ^ (bits >> _U(16)))


def relation_products(
    vectors: Tensor, matrices: Tensor, relation: Tensor, *, left: bool, share: float, key: int
) -> Tensor:
    """Compute x^T M, or M x if ``left`` is not set.

    Args:
        vectors: (..., D).
        matrices: (R, D * D), row by row.
        relation: (...) int64 ids.
        left: Whether the vector is on the left.
        share: Dropout probability of a matrix's elements, drawn anew for each query as ``dropped``
            draws for (Q, D * D); 0 drops none.
        key: The key of the draw, 62 bits.

    Returns:
        (..., D) float32, differentiable.
    """
    flat = vectors.reshape(-1, vectors.shape[-1]), matrices, relation.reshape(-1)
    return products(*flat, left, share, key).view(vectors.shape)


def _products(
    vectors: Tensor, matrices: Tensor, relation: Tensor, left: bool, share: float, key: int
) -> Tensor:
    """Return the products (Q, D) in float32."""
    (vectors, matrices), *args = _prepared(vectors, matrices, relation, share, key)
    out = torch.empty_like(vectors)
    _multiply(*args, left, out.numpy())
    return out


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
    (vectors, matrices), *args = _prepared(vectors, matrices, relation, share, key)
    grad_vectors, grad_matrices = torch.empty_like(vectors), torch.zeros_like(matrices)
    grads = grad.detach().float().contiguous(), grad_vectors, grad_matrices
    _accumulate(*args, left, *(x.numpy() for x in grads))
    return grad_vectors, grad_matrices


def _prepared(
    vectors: Tensor, matrices: Tensor, relation: Tensor, share: float, key: int
) -> tuple[Any, ...]:
    """Sort queries by relation and cut the relations into one part per thread.

    Returns:
        Both tensors in float32, then the arguments of the kernels: the number of parts, the work,
        the queries by relation, the relations of each part, and how to draw.
    """
    vectors, matrices = (x.detach().float().contiguous() for x in (vectors, matrices))
    places, bounds = by_row(relation.numpy(), len(matrices))
    work = len(places) * matrices.shape[1]
    parts = threads_for(len(places), work)
    ends = np.searchsorted(bounds, np.arange(parts + 1) * len(places) / parts)
    ends[0], ends[-1] = 0, len(matrices)
    # Not by .numpy(), after which FSDP could not free the matrices.
    tensors = vectors.numpy(), np.from_dlpack(matrices)
    draw = share > 0, *draw_arguments(share, key)
    return (vectors, matrices), parts, work, places, bounds, ends, *draw, *tensors


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)


def _save_products(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, left, share, key = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = left, share, key


def _backward_of_products(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *gradients(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


products = operator(
    "relation_products",
    _products,
    lambda vectors, *_: _like(vectors),
    save=_save_products,
    backward=_backward_of_products,
)
gradients = operator(
    "relation_gradients",
    _gradients,
    lambda grad, vectors, matrices, *_: (_like(vectors), _like(matrices)),
)


@block_kernel(1, fastmath=FUSED_SUMS)
def _multiply(
    start: int,
    stop: int,
    places: np.ndarray,
    bounds: np.ndarray,
    ends: np.ndarray,
    draws: bool,
    threshold: np.uint32,
    scale: np.float32,
    low: np.uint32,
    high: np.uint32,
    vectors: np.ndarray,
    matrices: np.ndarray,
    left: bool,
    out: np.ndarray,
) -> None:
    """Write the products of the queries of some parts, (Q, D) -> (Q, D)."""
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
                        y[j] += a * _kept(row[j], j, draws, first, high, threshold)
                else:
                    total = np.float32(0)
                    for j in range(dim):
                        total += x[j] * _kept(row[j], j, draws, first, high, threshold)
                    y[i] = total * scale


@block_kernel(1, fastmath=FUSED_SUMS)
def _accumulate(
    start: int,
    stop: int,
    places: np.ndarray,
    bounds: np.ndarray,
    ends: np.ndarray,
    draws: bool,
    threshold: np.uint32,
    scale: np.float32,
    low: np.uint32,
    high: np.uint32,
    vectors: np.ndarray,
    matrices: np.ndarray,
    left: bool,
    grad: np.ndarray,
    grad_vectors: np.ndarray,
    grad_matrices: np.ndarray,
) -> None:
    """Write the gradients of the vectors of some parts and add those of their matrices."""
    dim = vectors.shape[1]
    for relation in range(ends[start], ends[stop]):
        matrix, grad_matrix = matrices[relation], grad_matrices[relation]
        for query in places[bounds[relation] : bounds[relation + 1]]:
            # Whichever side x is on, a row of M meets one number of one and all of the other.
            x, g, grad_x = vectors[query], grad[query], grad_vectors[query]
            if not left:
                grad_x[:] = np.float32(0)
            for i in range(dim):
                row = matrix[i * dim : (i + 1) * dim]
                grad_row = grad_matrix[i * dim : (i + 1) * dim]
                first = _first(query, i, dim, low)
                if left:
                    a, total = x[i] * scale, np.float32(0)
                    for j in range(dim):
                        b = _kept(g[j], j, draws, first, high, threshold)
                        total += row[j] * b
                        grad_row[j] += a * b
                    grad_x[i] = total * scale
                else:
                    a = g[i] * scale
                    for j in range(dim):
                        b = _kept(a, j, draws, first, high, threshold)
                        grad_x[j] += row[j] * b
                        grad_row[j] += x[j] * b


@helper
def _first(query: int, row: int, dim: int, low: np.uint32) -> np.uint32:
    """Return the first draw of a row of a query's matrix."""
    return _U(_U((query * dim + row) * dim) + low)


@helper
def _kept(
    value: np.float32,
    place: int,
    draws: bool,
    first: np.uint32,
    high: np.uint32,
    threshold: np.uint32,
) -> np.float32:
    """Return the value, or 0 if that place after the first is dropped."""
    is_dropped = draws and mixed(_U(mixed(_U(_U(place) + first)) ^ high)) < threshold
    return value * (np.float32(0) if is_dropped else np.float32(1))  # NaN stays
