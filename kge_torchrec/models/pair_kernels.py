"""Scores of pairs of a query and a row on a CPU, by kernels that keep nothing for each pair.

    dot         <q, x>
    manhattan   sum |q - x|
    euclidean   ||q - x||
    moduli      sum of |q - x| over complex numbers, which lie side by side as (re, im)

A row is named by its place in a table, so that one which is a candidate of many queries is neither
copied for each of them nor given a gradient for each.

**Forward** four rows meet a query at a time, which is then read once for all of them.

**Backward** every query, and after that every row, pulls in the gradients of its pairs, four at a
time: from (weight, other end) of each pair into one sum, which stays in the nearest cache.  What a
pair gives is computed twice, but each sum has one writer: no gradient is ever held for a pair, and
any number of threads gives the same bits.  The pairs of a row are found by a counting sort.

A pair's score depends on its own numbers alone, wherever it stands: the last rows of a query are
filled up to four by repeating one, so that all go through the same instructions.

Shapes: C chunks, b queries a chunk, K candidates a chunk, U rows, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kge_torchrec.models.ops import EPSILON, Comparison
from kge_torchrec.models.row_sums import JIT, by_row, threads_for

_COMPARISONS: tuple[Comparison, ...] = get_args(Comparison)
_DOT, _EUCLIDEAN, _MANHATTAN, _MODULI = range(4)  # their places
_EPSILON = np.float32(EPSILON)

_QUERIES = 16  # that a thread takes at once: what they hold stays in the nearest cache
_ROWS = 16  # few, for threads to end together: some rows have more pairs than others
# Sums may run in vector lanes, products may be fused with them.
_FAST = {"reassoc", "nsz", "contract"}


def pair_scores(
    comparison: Comparison, query: Tensor, rows: Tensor, index: Tensor | None = None
) -> Tensor:
    """Every query compared with the candidates of its chunk: (C, b, K) float32.

    query: (C, b, D); rows: (U, D), of which index, (C, K) int64, picks the candidates; without it
    rows are (C, K, D).  Half precision is computed in float32.  D is even for "moduli".

    Raises IndexError where the index leaves the table.
    """
    query, rows = query.float(), rows.float()
    if index is None:
        chunks, candidates, dim = rows.shape
        rows = rows.reshape(-1, dim)
        index = torch.arange(chunks * candidates).view(chunks, candidates)
    given = (x.contiguous() for x in (query, rows, index))
    return _scores(*given, _COMPARISONS.index(comparison))


# Operators of torch's, so that torch.compile takes them as they are.


@torch.library.custom_op("kge_torchrec::pair_scores", mutates_args=(), device_types="cpu")
def _scores(query: Tensor, rows: Tensor, index: Tensor, kind: int) -> Tensor:
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(rows):
        raise IndexError(f"candidates {int(index.min())} to {int(index.max())} of {len(rows)} rows")
    scores = query.new_empty(*query.shape[:2], index.shape[1])
    _over_queries(_score_blocks, _score_in_parallel, kind, query, rows, index, scores)
    return scores


@torch.library.custom_op("kge_torchrec::pair_queries", mutates_args=(), device_types="cpu")
def _gradient_of_queries(
    query: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: int
) -> Tensor:
    grad = torch.empty_like(query)
    kernels = _pull_into_queries, _pull_into_queries_in_parallel
    _over_queries(*kernels, kind, query, rows, index, weights, grad)
    return grad


@torch.library.custom_op("kge_torchrec::pair_rows", mutates_args=(), device_types="cpu")
def _gradient_of_rows(
    query: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: int
) -> Tensor:
    grad = torch.empty_like(rows)
    places, bounds = by_row(index.reshape(-1).numpy(), len(rows))
    blocks = -(-len(rows) // _ROWS)
    arguments = (*_arrays(query, rows), index.shape[1], places, bounds, *_arrays(weights, grad))
    if threads_for(blocks, weights.numel() * query.shape[2]) == 1:
        _pull_into_rows(kind, 0, blocks, *arguments)
    else:
        _pull_into_rows_in_parallel(kind, blocks, *arguments)
    return grad


def _over_queries(
    serial: Callable[..., None],
    parallel: Callable[..., None],
    kind: int,
    query: Tensor,
    rows: Tensor,
    index: Tensor,
    *of_pairs: Tensor,
) -> None:
    """Runs a kernel over blocks of queries, on as many threads as pay."""
    blocks = len(index) * -(-query.shape[1] // _QUERIES)
    arguments = _arrays(query, rows, index, *of_pairs)
    if threads_for(blocks, query.numel() * index.shape[1]) == 1:
        serial(kind, 0, blocks, *arguments)
    else:
        parallel(kind, blocks, *arguments)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, rows, index, ctx.kind = inputs
    ctx.save_for_backward(query, rows, index, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    query, rows, index, scores = ctx.saved_tensors
    weights = grad.contiguous()
    if ctx.kind == _EUCLIDEAN:  # 0 where rows are equal, as torch.cdist has it
        weights = torch.where(scores > 0, weights / scores, 0)
    given = query, rows, index, weights, ctx.kind
    of_query = _gradient_of_queries(*given) if ctx.needs_input_grad[0] else None
    of_rows = _gradient_of_rows(*given) if ctx.needs_input_grad[1] else None
    return of_query, of_rows, None, None


_scores.register_autograd(_backward, setup_context=_keep)
_scores.register_fake(
    lambda query, rows, index, kind: query.new_empty(*query.shape[:2], index.shape[1])
)
_gradient_of_queries.register_fake(lambda query, *_: torch.empty_like(query))
_gradient_of_rows.register_fake(lambda query, rows, *_: torch.empty_like(rows))


def _arrays(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    return tuple(tensor.detach().numpy() for tensor in tensors)


@njit(fastmath=_FAST, **JIT)
def _compare(
    kind: int, q: np.ndarray, x0: np.ndarray, x1: np.ndarray, x2: np.ndarray, x3: np.ndarray
) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """Scores of a query (D,) and four rows (D,)."""
    s0 = s1 = s2 = s3 = np.float32(0)
    if kind == _DOT:
        for d in range(q.shape[0]):
            a = q[d]
            s0 += a * x0[d]
            s1 += a * x1[d]
            s2 += a * x2[d]
            s3 += a * x3[d]
    elif kind == _MANHATTAN:
        for d in range(q.shape[0]):
            a = q[d]
            s0 += abs(a - x0[d])
            s1 += abs(a - x1[d])
            s2 += abs(a - x2[d])
            s3 += abs(a - x3[d])
    elif kind == _EUCLIDEAN:
        for d in range(q.shape[0]):
            a = q[d]
            s0 += (a - x0[d]) * (a - x0[d])
            s1 += (a - x1[d]) * (a - x1[d])
            s2 += (a - x2[d]) * (a - x2[d])
            s3 += (a - x3[d]) * (a - x3[d])
        s0, s1, s2, s3 = np.sqrt(s0), np.sqrt(s1), np.sqrt(s2), np.sqrt(s3)
    else:
        for d in range(q.shape[0] // 2):
            a, b = q[2 * d], q[2 * d + 1]
            s0 += _modulus(a - x0[2 * d], b - x0[2 * d + 1])
            s1 += _modulus(a - x1[2 * d], b - x1[2 * d + 1])
            s2 += _modulus(a - x2[2 * d], b - x2[2 * d + 1])
            s3 += _modulus(a - x3[2 * d], b - x3[2 * d + 1])
    return s0, s1, s2, s3


@njit(fastmath=_FAST, **JIT)
def _modulus(real: np.float32, imaginary: np.float32) -> np.float32:
    return np.sqrt(real * real + imaginary * imaginary + _EPSILON)


@njit(**JIT)
def _score_blocks(
    kind: int,
    start: int,
    stop: int,
    query: np.ndarray,
    rows: np.ndarray,
    index: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Blocks of ``_QUERIES`` queries, counted through all chunks."""
    count, last = query.shape[1], index.shape[1] - 1
    per_chunk = (count + _QUERIES - 1) // _QUERIES
    for block in range(start, stop):
        c, first = block // per_chunk, block % per_chunk * _QUERIES
        picked = index[c]
        for k in range(0, last + 1, 4):
            k1, k2, k3 = min(k + 1, last), min(k + 2, last), min(k + 3, last)
            x0, x1, x2, x3 = rows[picked[k]], rows[picked[k1]], rows[picked[k2]], rows[picked[k3]]
            for i in range(first, min(first + _QUERIES, count)):
                found = _compare(kind, query[c, i], x0, x1, x2, x3)
                out = scores[c, i]
                out[k], out[k1], out[k2], out[k3] = found


@njit(parallel=True, **JIT)
def _score_in_parallel(
    kind: int,
    blocks: int,
    query: np.ndarray,
    rows: np.ndarray,
    index: np.ndarray,
    scores: np.ndarray,
) -> None:
    for block in prange(blocks):
        _score_blocks(kind, block, block + 1, query, rows, index, scores)


@njit(fastmath=_FAST, **JIT)
def _pull(
    kind: int,
    w0: np.float32,
    w1: np.float32,
    w2: np.float32,
    w3: np.float32,
    end: np.ndarray,
    x0: np.ndarray,
    x1: np.ndarray,
    x2: np.ndarray,
    x3: np.ndarray,
    total: np.ndarray,
) -> None:
    """Adds to the gradient of one end (D,) what four pairs of given weights give it."""
    if kind == _DOT:
        for d in range(total.shape[0]):
            total[d] += w0 * x0[d] + w1 * x1[d] + w2 * x2[d] + w3 * x3[d]
    elif kind == _EUCLIDEAN:
        for d in range(total.shape[0]):
            a = end[d]
            near = w0 * (a - x0[d]) + w1 * (a - x1[d])
            total[d] += near + w2 * (a - x2[d]) + w3 * (a - x3[d])
    else:
        for d in range(total.shape[0] // 2):
            a, b = end[2 * d], end[2 * d + 1]
            real0, imaginary0 = a - x0[2 * d], b - x0[2 * d + 1]
            real1, imaginary1 = a - x1[2 * d], b - x1[2 * d + 1]
            real2, imaginary2 = a - x2[2 * d], b - x2[2 * d + 1]
            real3, imaginary3 = a - x3[2 * d], b - x3[2 * d + 1]
            v0, v1 = w0 / _modulus(real0, imaginary0), w1 / _modulus(real1, imaginary1)
            v2, v3 = w2 / _modulus(real2, imaginary2), w3 / _modulus(real3, imaginary3)
            total[2 * d] += v0 * real0 + v1 * real1 + v2 * real2 + v3 * real3
            total[2 * d + 1] += (
                v0 * imaginary0 + v1 * imaginary1 + v2 * imaginary2 + v3 * imaginary3
            )


@njit(**JIT)  # nothing may be reordered here: the signs of small differences decide
def _pull_signs(
    w0: np.float32,
    w1: np.float32,
    w2: np.float32,
    w3: np.float32,
    end: np.ndarray,
    x0: np.ndarray,
    x1: np.ndarray,
    x2: np.ndarray,
    x3: np.ndarray,
    total: np.ndarray,
) -> None:
    """``_pull`` of the Manhattan distance."""
    none = np.float32(0)
    for d in range(total.shape[0]):
        a = end[d]
        s0 = w0 if a > x0[d] else (-w0 if a < x0[d] else none)
        s1 = w1 if a > x1[d] else (-w1 if a < x1[d] else none)
        s2 = w2 if a > x2[d] else (-w2 if a < x2[d] else none)
        s3 = w3 if a > x3[d] else (-w3 if a < x3[d] else none)
        total[d] += (s0 + s1) + (s2 + s3)


@njit(**JIT)
def _pull_into_queries(
    kind: int,
    start: int,
    stop: int,
    query: np.ndarray,
    rows: np.ndarray,
    index: np.ndarray,
    weights: np.ndarray,
    grad: np.ndarray,
) -> None:
    """Blocks as ``_score_blocks``."""
    count, last, none = query.shape[1], index.shape[1] - 1, np.float32(0)
    per_chunk = (count + _QUERIES - 1) // _QUERIES
    for block in range(start, stop):
        c, first = block // per_chunk, block % per_chunk * _QUERIES
        picked, end = index[c], min(first + _QUERIES, count)
        grad[c, first:end] = none
        for k in range(0, last + 1, 4):
            k1, k2, k3 = min(k + 1, last), min(k + 2, last), min(k + 3, last)
            x0, x1, x2, x3 = rows[picked[k]], rows[picked[k1]], rows[picked[k2]], rows[picked[k3]]
            for i in range(first, end):
                w = weights[c, i]
                w0 = w[k]
                w1 = w[k1] if k1 > k else none
                w2 = w[k2] if k2 > k1 else none
                w3 = w[k3] if k3 > k2 else none
                if kind == _MANHATTAN:
                    _pull_signs(w0, w1, w2, w3, query[c, i], x0, x1, x2, x3, grad[c, i])
                else:
                    _pull(kind, w0, w1, w2, w3, query[c, i], x0, x1, x2, x3, grad[c, i])


@njit(parallel=True, **JIT)
def _pull_into_queries_in_parallel(
    kind: int,
    blocks: int,
    query: np.ndarray,
    rows: np.ndarray,
    index: np.ndarray,
    weights: np.ndarray,
    grad: np.ndarray,
) -> None:
    for block in prange(blocks):
        _pull_into_queries(kind, block, block + 1, query, rows, index, weights, grad)


@njit(**JIT)
def _pull_into_rows(
    kind: int,
    start: int,
    stop: int,
    query: np.ndarray,
    rows: np.ndarray,
    candidates: int,
    places: np.ndarray,
    bounds: np.ndarray,
    weights: np.ndarray,
    grad: np.ndarray,
) -> None:
    """Blocks of ``_ROWS`` rows."""
    # The pairs of a row that wait to be four: their queries' chunks and places, and weights.
    chunk, place = np.zeros(4, np.int64), np.zeros(4, np.int64)
    weight = np.zeros(4, np.float32)
    for row in range(start * _ROWS, min(stop * _ROWS, rows.shape[0])):
        waiting = 0
        grad[row] = np.float32(0)
        for at in range(bounds[row], bounds[row + 1]):
            c, k = places[at] // candidates, places[at] % candidates
            for i in range(query.shape[1]):
                chunk[waiting], place[waiting], weight[waiting] = c, i, weights[c, i, k]
                waiting += 1
                if waiting == 4:
                    _pull_four(kind, chunk, place, weight, query, rows[row], grad[row])
                    waiting = 0
        if waiting > 0:
            weight[waiting:] = np.float32(0)
            _pull_four(kind, chunk, place, weight, query, rows[row], grad[row])


@njit(**JIT)
def _pull_four(
    kind: int,
    chunk: np.ndarray,
    place: np.ndarray,
    weight: np.ndarray,
    query: np.ndarray,
    row: np.ndarray,
    total: np.ndarray,
) -> None:
    q0, q1 = query[chunk[0], place[0]], query[chunk[1], place[1]]
    q2, q3 = query[chunk[2], place[2]], query[chunk[3], place[3]]
    w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
    if kind == _MANHATTAN:
        _pull_signs(w0, w1, w2, w3, row, q0, q1, q2, q3, total)
    else:
        _pull(kind, w0, w1, w2, w3, row, q0, q1, q2, q3, total)


@njit(parallel=True, **JIT)
def _pull_into_rows_in_parallel(
    kind: int,
    blocks: int,
    query: np.ndarray,
    rows: np.ndarray,
    candidates: int,
    places: np.ndarray,
    bounds: np.ndarray,
    weights: np.ndarray,
    grad: np.ndarray,
) -> None:
    for block in prange(blocks):
        _pull_into_rows(
            kind, block, block + 1, query, rows, candidates, places, bounds, weights, grad
        )
