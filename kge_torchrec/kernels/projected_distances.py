"""HousE's pairs of a query and a row on a CPU: the query projects rows before the comparison.

    sum over blocks i of ||q_i - P x_i||,  P of projections x - s u <u, x>, the last one first

torch holds every projected row of a block of pairs, of each projection anew. Here a pair's elements
stay in the nearest cache, and in backward queries and rows accumulate the gradients of their pairs
as in ``pair_kernels``: computed twice, one writer for each sum, the same bits for any number of
threads.

A row is B blocks of k elements. Kernels have the first elements of all its blocks side by side,
then the second ones: loops run over blocks, which do not depend on each other, in vector lanes.

Shapes: C chunks, b queries per chunk, K candidates per chunk, U rows, D = B k elements per row,
P projections.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.jit import SUMS, block_kernel, helper
from kge_torchrec.kernels.library import EPSILON, arrays, operator
from kge_torchrec.kernels.rows import by_row, check_candidates

_EPSILON = np.float32(EPSILON)
_BLOCK = 16  # queries or rows per block of a thread
_SIDE_BY_SIDE = 4  # pairs: a loop over the blocks of one is too short for what it costs to begin


def projected_distances(
    point: Tensor,
    vectors: Tensor,
    scales: Tensor,
    rows: Tensor,
    block: int,
    index: Tensor | None = None,
) -> Tensor:
    """Compare every query with the candidates of its chunk.

    Half precision is computed in float32.

    Args:
        point: (C, b, D).
        vectors: (C, b, P D).
        scales: (C, b, P B).
        rows: (U, D), or (C, K, D) without an index.
        block: k.
        index: (C, K) int64 positions of the candidates in ``rows``, or None.

    Returns:
        (C, b, K) float32, differentiable.

    Raises:
        IndexError: A position is outside the rows.
    """
    if index is None:
        index = torch.arange(rows.shape[0] * rows.shape[1]).view(rows.shape[:2])
        rows = rows.flatten(0, 1)
    blocks = rows.shape[-1] // block

    def across(x: Tensor) -> Tensor:
        """Put the blocks side by side: (..., n D) -> (..., n, k, B)."""
        parts = x.float().unflatten(-1, (x.shape[-1] // (block * blocks), blocks, block))
        return parts.transpose(-1, -2).contiguous()

    lanes = scales.float().unflatten(-1, (scales.shape[-1] // blocks, blocks)).contiguous()
    inputs = across(point)[..., 0, :, :], across(vectors), lanes, across(rows)[..., 0, :, :]
    return distances(*inputs, index.contiguous())


def _distances(
    point: Tensor, vectors: Tensor, scales: Tensor, rows: Tensor, index: Tensor
) -> Tensor:
    """Return the distances (C, b, K) from inputs whose blocks lie side by side."""
    check_candidates(index, len(rows))
    out = point.new_empty(*point.shape[:2], index.shape[1])
    args = arrays(point, vectors, scales, rows, index, out)
    _measure(len(point) * point.shape[1], out.numel() * rows.shape[1:].numel(), *args)
    return out


def _gradients(
    point: Tensor, vectors: Tensor, scales: Tensor, rows: Tensor, index: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the first four inputs; weights: (C, b, K), those of the distances."""
    inputs = point, vectors, scales, rows
    grads = [torch.zeros_like(x) for x in inputs]
    tensors, elements = arrays(*inputs), weights.numel() * rows.shape[1:].numel()
    pairs = weights.detach().contiguous().numpy()
    args = *tensors, index.numpy(), pairs, *arrays(*grads[:3])
    _accumulate_queries(len(point) * point.shape[1], elements, *args)
    places = by_row(index.reshape(-1).numpy(), len(rows))
    _accumulate_rows(len(rows), elements, *tensors, *places, pairs, grads[3].numpy())
    return grads[0], grads[1], grads[2], grads[3]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *gradients(*ctx.saved_tensors, grad), None


distances = operator(
    "projected_distances",
    _distances,
    lambda point, vectors, scales, rows, index: point.new_empty(*point.shape[:2], index.shape[1]),
    save=_save,
    backward=_backward,
)
gradients = operator(
    "projected_gradients", _gradients, lambda *inputs: tuple(map(torch.empty_like, inputs[:4]))
)


@block_kernel(_BLOCK)
def _measure(
    start: int,
    stop: int,
    point: np.ndarray,
    vectors: np.ndarray,
    scales: np.ndarray,
    rows: np.ndarray,
    index: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write the distances of queries, counted through all chunks."""
    (q, u, s), x = _tiles_of_query(vectors, scales), _tile(rows[0])
    projected, inner, lengths = np.empty_like(u), np.empty_like(s), np.empty_like(x[0])
    count, blocks = index.shape[1], rows.shape[2]
    for query in range(start, stop):
        c, i = query // point.shape[1], query % point.shape[1]
        for t in range(_SIDE_BY_SIDE):
            _put_query(t, point[c, i], vectors[c, i], scales[c, i], q, u, s)
        for k in range(0, count, _SIDE_BY_SIDE):
            for t in range(_SIDE_BY_SIDE):
                _put(t, rows[index[c, min(k + t, count - 1)]], x)
            _lengths(_project(u, s, x, projected, inner), q, lengths)
            for t in range(min(_SIDE_BY_SIDE, count - k)):
                out[c, i, k + t] = _sum(lengths[t * blocks : (t + 1) * blocks])


@block_kernel(_BLOCK)
def _accumulate_queries(
    start: int,
    stop: int,
    point: np.ndarray,
    vectors: np.ndarray,
    scales: np.ndarray,
    rows: np.ndarray,
    index: np.ndarray,
    weights: np.ndarray,
    grad_point: np.ndarray,
    grad_vectors: np.ndarray,
    grad_scales: np.ndarray,
) -> None:
    """Write the gradients of queries and of their vectors and scales."""
    (q, u, s), x = _tiles_of_query(vectors, scales), _tile(rows[0])
    (grad_q, grad_u, grad_s), grad_row = _tiles_of_query(vectors, scales), _tile(rows[0])
    projected, inner, inner_grad = np.empty_like(u), np.empty_like(s), np.empty_like(x[0])
    weight, count, last = np.empty_like(x[0]), index.shape[1], u.shape[0] - 1
    for query in range(start, stop):
        c, i = query // point.shape[1], query % point.shape[1]
        grad_q[:], grad_u[:], grad_s[:] = np.float32(0), np.float32(0), np.float32(0)
        for t in range(_SIDE_BY_SIDE):
            _put_query(t, point[c, i], vectors[c, i], scales[c, i], q, u, s)
        for k in range(0, count, _SIDE_BY_SIDE):
            for t in range(_SIDE_BY_SIDE):
                _put(t, rows[index[c, min(k + t, count - 1)]], x)
                _weigh(t, weights[c, i, k + t] if k + t < count else np.float32(0), weight)
            _grad_row(_project(u, s, x, projected, inner), q, weight, inner_grad, grad_row)
            for r in range(grad_row.shape[0]):
                _subtract(grad_row[r], grad_q[r])
            for p in range(last + 1):
                before = x if p == last else projected[p + 1]
                _inner(u[p], grad_row, inner_grad)
                _subtract_products(inner[p], inner_grad, grad_s[p])
                for r in range(grad_row.shape[0]):
                    arguments = inner[p], grad_row[r], inner_grad, before[r]
                    _subtract_of_vector(s[p], *arguments, grad_u[p, r])
                _remove(s[p], inner_grad, u[p], grad_row, grad_row)
        _fold(grad_q, grad_point[c, i])
        _fold(grad_s, grad_scales[c, i])
        for p in range(last + 1):
            _fold(grad_u[p], grad_vectors[c, i, p])


@block_kernel(_BLOCK)
def _accumulate_rows(
    start: int,
    stop: int,
    point: np.ndarray,
    vectors: np.ndarray,
    scales: np.ndarray,
    rows: np.ndarray,
    places: np.ndarray,
    bounds: np.ndarray,
    weights: np.ndarray,
    grad_rows: np.ndarray,
) -> None:
    """Write the gradients of rows, each from the places where it is a candidate."""
    (q, u, s), x = _tiles_of_query(vectors, scales), _tile(rows[0])
    grad_x, grad_row, weight = _tile(rows[0]), _tile(rows[0]), np.zeros_like(x[0])
    projected, inner, inner_grad = np.empty_like(u), np.empty_like(s), np.empty_like(x[0])
    for row in range(start, stop):
        grad_x[:], filled = np.float32(0), 0
        for t in range(_SIDE_BY_SIDE):
            _put(t, rows[row], x)
        for place in range(bounds[row], bounds[row + 1]):
            c, k = places[place] // weights.shape[2], places[place] % weights.shape[2]
            for i in range(point.shape[1]):
                _put_query(filled, point[c, i], vectors[c, i], scales[c, i], q, u, s)
                _weigh(filled, weights[c, i, k], weight)
                filled += 1
                is_last = place == bounds[row + 1] - 1 and i == point.shape[1] - 1
                if filled < _SIDE_BY_SIDE and not is_last:
                    continue
                for t in range(filled, _SIDE_BY_SIDE):
                    _weigh(t, np.float32(0), weight)
                _grad_row(_project(u, s, x, projected, inner), q, weight, inner_grad, grad_row)
                for p in range(u.shape[0]):
                    _inner(u[p], grad_row, inner_grad)
                    _remove(s[p], inner_grad, u[p], grad_row, grad_row)
                for r in range(grad_row.shape[0]):
                    _add(grad_row[r], grad_x[r])
                filled = 0
        _fold(grad_x, grad_rows[row])


# Tiles: the blocks of four pairs side by side, (..., 4 B).


@helper
def _tile(row: np.ndarray) -> np.ndarray:
    """Return a tile of zeros for four rows (k, B): lanes that are never filled stay finite."""
    return np.zeros((row.shape[0], _SIDE_BY_SIDE * row.shape[1]), np.float32)


@helper
def _tiles_of_query(
    vectors: np.ndarray, scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tiles for the points, vectors and scales of four queries."""
    projections, size, blocks = vectors.shape[2:]
    lanes = _SIDE_BY_SIDE * blocks
    point = np.zeros((size, lanes), np.float32)
    grad_vectors = np.zeros((projections, size, lanes), np.float32)
    return point, grad_vectors, np.zeros((projections, lanes), np.float32)


@helper
def _put(t: int, x: np.ndarray, tile: np.ndarray) -> None:
    """Copy x (k, B) into the lanes of pair t."""
    blocks = x.shape[1]
    for r in range(x.shape[0]):
        for i in range(blocks):
            tile[r, t * blocks + i] = x[r, i]


@helper
def _put_query(
    t: int,
    point: np.ndarray,
    vectors: np.ndarray,
    scales: np.ndarray,
    q: np.ndarray,
    u: np.ndarray,
    s: np.ndarray,
) -> None:
    """Copy a query into the lanes of pair t."""
    _put(t, point, q)
    _put(t, scales, s)
    for p in range(vectors.shape[0]):
        _put(t, vectors[p], u[p])


@helper
def _weigh(t: int, weight: np.float32, tile: np.ndarray) -> None:
    """Set the weights in the lanes of pair t."""
    blocks = tile.shape[0] // _SIDE_BY_SIDE
    tile[t * blocks : (t + 1) * blocks] = weight


@helper
def _fold(tile: np.ndarray, out: np.ndarray) -> None:
    """Sum the lanes of the four pairs: (k, 4 B) -> (k, B)."""
    blocks = out.shape[1]
    for r in range(out.shape[0]):
        for i in range(blocks):
            near = tile[r, i] + tile[r, blocks + i]
            out[r, i] = near + (tile[r, 2 * blocks + i] + tile[r, 3 * blocks + i])


@helper
def _project(
    u: np.ndarray, s: np.ndarray, row: np.ndarray, projected: np.ndarray, inner: np.ndarray
) -> np.ndarray:
    """Return the row (k, B) after all projections; projected[p] is the row after projection p."""
    for p in range(u.shape[0] - 1, -1, -1):
        _inner(u[p], row, inner[p])
        _remove(s[p], inner[p], u[p], row, projected[p])
        row = projected[p]
    return row


@helper
def _inner(u: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """Write <u, x> of each block: (k, B), (k, B) -> (B,)."""
    out[:] = np.float32(0)
    for r in range(u.shape[0]):
        _add_products(u[r], x[r], out)


@helper
def _remove(
    s: np.ndarray, inner: np.ndarray, u: np.ndarray, x: np.ndarray, out: np.ndarray
) -> None:
    """Write x - s <u, x> u."""
    for r in range(u.shape[0]):
        _less(s, inner, u[r], x[r], out[r])


@helper
def _lengths(end: np.ndarray, point: np.ndarray, out: np.ndarray) -> None:
    """Write the lengths of the blocks of a difference."""
    out[:] = _EPSILON  # the gradient of a length is finite at 0 so
    for r in range(point.shape[0]):
        _add_squares(end[r], point[r], out)
    for i in range(out.shape[0]):
        out[i] = np.sqrt(out[i])


@helper
def _grad_row(
    end: np.ndarray, point: np.ndarray, weight: np.ndarray, share: np.ndarray, out: np.ndarray
) -> None:
    """Write the gradient of the projected row; share: scratch (B,) like the weights."""
    _lengths(end, point, share)
    for i in range(share.shape[0]):
        share[i] = weight[i] / share[i]
    for r in range(point.shape[0]):
        _scaled_difference(share, end[r], point[r], out[r])


# Loops over blocks; all arrays are (B,).


@helper
def _add(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.shape[0]):
        out[i] += x[i]


@helper
def _subtract(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.shape[0]):
        out[i] -= x[i]


@helper
def _add_products(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.shape[0]):
        out[i] += x[i] * y[i]


@helper
def _subtract_products(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.shape[0]):
        out[i] -= x[i] * y[i]


@helper
def _add_squares(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.shape[0]):
        out[i] += (x[i] - y[i]) * (x[i] - y[i])


@helper
def _scaled_difference(scale: np.ndarray, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.shape[0]):
        out[i] = scale[i] * (x[i] - y[i])


@helper
def _less(s: np.ndarray, inner: np.ndarray, u: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.shape[0]):
        out[i] = x[i] - s[i] * inner[i] * u[i]


@helper
def _subtract_of_vector(
    s: np.ndarray,
    inner: np.ndarray,
    grad_row: np.ndarray,
    inner_grad: np.ndarray,
    x: np.ndarray,
    out: np.ndarray,
) -> None:
    for i in range(out.shape[0]):
        out[i] -= s[i] * (inner[i] * grad_row[i] + inner_grad[i] * x[i])


@helper(fastmath=SUMS)
def _sum(x: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i]
    return total
