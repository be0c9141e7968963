"""Scores of pairs of a query and a row on a CPU, and their gradients.

    dot                 <q, x>
    manhattan           sum |q - x|
    euclidean           ||q - x||
    moduli              sum of |q - x| over complex numbers, interleaved as (re, im)
    scaled_manhattan    sum |q - m x|                     the query has a second vector m
    scaled_squares      ||q - m x||^2

Rows are given by position, so that candidates of many queries are not copied, and no tensor per
pair is materialized. Each sum of gradients has one writer, so any number of threads gives the same
bits. A kind is a term and its derivative; a run compiles the kinds that it uses.

Brings: without it a step (1,024 triples, 128 negatives, 256 elements, one thread) takes 353 instead
of 35 ms for ComplEx with negatives of its own per triple, 94 instead of 27 for TransE, 992 instead
of 51 for RotatE, 373 instead of 39 for PairRE, 242 instead of 30 for MuRE. One pair at a time,
without the fours, kernels take 1.06 to 1.2 times as long.

Shapes: C chunks, b queries and K candidates per chunk, U rows, D elements per row; maps (C, b, D),
or (C, b, 0) without maps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.ids import by_row, check_within
from kge_torchrec.kernels.jit import FUSED_SUMS, helper
from kge_torchrec.kernels.library import EPSILON, Compared, Mapped, arrays, operator
from kge_torchrec.kernels.parallel import BlockKernel, block_kernel

_EPSILON, _ZERO, _ONE = np.float32(EPSILON), np.float32(0), np.float32(1)
QUERIES = ROWS = 16  # per block of a thread: the rows of 16 queries stay in the nearest cache


def pair_scores(
    kind: Compared | Mapped,
    query: Tensor,
    rows: Tensor,
    index: Tensor | None = None,
    maps: Tensor | None = None,
) -> Tensor:
    """Compare queries (C, b, D) with the candidates of their chunk, in float32; differentiable.

    The arguments are those of ``comparisons.distance``; "moduli" needs an even D.

    Raises:
        IndexError: A position is outside the table.
    """
    query, rows = query.float(), rows.float()
    maps = query.new_empty(*query.shape[:2], 0) if maps is None else maps.float()
    if index is None:
        index = torch.arange(rows.shape[0] * rows.shape[1]).view(rows.shape[:2])
        rows = rows.flatten(0, 1)
    return score(*(x.contiguous() for x in (query, maps, rows, index)), kind)


def _score(query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, kind: str) -> Tensor:
    check_within("candidates", index, len(rows))
    scores = query.new_empty(*query.shape[:2], index.shape[1])
    _over_queries(_scores_of(kind), query, maps, rows, index, scores)
    return scores


def _query_gradients(
    query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    grads = torch.empty_like(query), torch.empty_like(maps)
    _over_queries(_gradients_of_queries(kind), query, maps, rows, index, weights, *grads)
    return grads


def _over_queries(kernel: BlockKernel, query: Tensor, *tensors: Tensor) -> None:
    work = query.numel() * tensors[2].shape[1]
    blocks = len(query) * -(-query.shape[1] // QUERIES)
    kernel(blocks, work, *arrays(query, *tensors))


def _row_gradients(
    query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: str
) -> Tensor:
    grad = torch.empty_like(rows)
    places = by_row(index.reshape(-1).numpy(), len(rows))
    args = *arrays(query, maps, rows), index.shape[1], *places, *arrays(weights, grad)
    _gradients_of_rows(kind)(len(rows), weights.numel() * query.shape[2], *args)
    return grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kind = inputs
    ctx.save_for_backward(*tensors, output if ctx.kind == "euclidean" else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, scores = ctx.saved_tensors
    weights, kind = grad.contiguous(), ctx.kind
    if kind == "euclidean":  # 0 where rows are equal, as in torch.cdist
        weights = torch.where(scores > 0, weights / scores, 0)
    elif kind == "scaled_squares":
        weights = 2 * weights
    needs_query, needs_maps, needs_rows, *_ = ctx.needs_input_grad
    of_query = (
        query_gradients(*inputs, weights, kind) if needs_query or needs_maps else (None, None)
    )
    of_rows = row_gradients(*inputs, weights, kind) if needs_rows else None
    return *of_query, of_rows, None, None


score = operator(
    "pair_scores",
    _score,
    lambda query, maps, rows, index, kind: query.new_empty(*query.shape[:2], index.shape[1]),
    save=_save,
    backward=_backward,
)
query_gradients = operator(
    "pair_query_gradients",
    _query_gradients,
    lambda query, maps, *_: (torch.empty_like(query), torch.empty_like(maps)),
)
row_gradients = operator(
    "pair_row_gradients", _row_gradients, lambda query, maps, rows, *_: torch.empty_like(rows)
)


# Kernels of a kind, all arrays as in the operators; items are blocks of queries or rows. A query is
# read once for four rows, and a row's sum once for four queries. Where a chunk's candidates are no
# multiple of four, the last is scored again: so all pairs go through the same instructions.


@helper
def _queries_of(block: int, query: np.ndarray) -> tuple[int, int, int]:
    """Return the chunk of a block, its first query and the one after its last."""
    per_chunk = (query.shape[1] + QUERIES - 1) // QUERIES
    first = block % per_chunk * QUERIES
    return block // per_chunk, first, min(first + QUERIES, query.shape[1])


@helper
def _four_rows(rows: np.ndarray, index: np.ndarray, k: int) -> Any:
    """Return the rows of the candidates from k on, and their places."""
    last = index.shape[0] - 1
    at = k, min(k + 1, last), min(k + 2, last), min(k + 3, last)
    return (rows[index[at[0]]], rows[index[at[1]]], rows[index[at[2]]], rows[index[at[3]]]), at


@cache
def _scores_of(kind: str) -> BlockKernel:
    compare, *_ = FORMULAS[kind]

    @block_kernel(1, name=f"score_{kind}")
    def score(
        start: int,
        stop: int,
        query: np.ndarray,
        maps: np.ndarray,
        rows: np.ndarray,
        index: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        for block in range(start, stop):
            c, first, end = _queries_of(block, query)
            for k in range(0, index.shape[1], 4):
                x, (k0, k1, k2, k3) = _four_rows(rows, index[c], k)
                for i in range(first, end):
                    out = scores[c, i]
                    out[k0], out[k1], out[k2], out[k3] = compare(query[c, i], maps[c, i], x)

    return score


@cache
def _gradients_of_queries(kind: str) -> BlockKernel:
    _, add_to_query, *_ = FORMULAS[kind]

    @block_kernel(1, name=f"gradients_of_queries_{kind}")
    def of_queries(
        start: int,
        stop: int,
        query: np.ndarray,
        maps: np.ndarray,
        rows: np.ndarray,
        index: np.ndarray,
        weights: np.ndarray,
        grad: np.ndarray,
        grad_maps: np.ndarray,
    ) -> None:
        for block in range(start, stop):
            c, first, end = _queries_of(block, query)
            grad[c, first:end], grad_maps[c, first:end] = _ZERO, _ZERO
            for k in range(0, index.shape[1], 4):
                x, (k0, k1, k2, k3) = _four_rows(rows, index[c], k)
                for i in range(first, end):
                    w1 = weights[c, i, k1] if k1 > k0 else _ZERO
                    w2 = weights[c, i, k2] if k2 > k1 else _ZERO
                    w3 = weights[c, i, k3] if k3 > k2 else _ZERO
                    w = weights[c, i, k0], w1, w2, w3
                    add_to_query(w, query[c, i], maps[c, i], x, grad[c, i], grad_maps[c, i])

    return of_queries


@cache
def _gradients_of_rows(kind: str) -> BlockKernel:
    *_, add_to_row, add_four_to_row = FORMULAS[kind]

    @block_kernel(ROWS, name=f"gradients_of_rows_{kind}")
    def of_rows(
        start: int,
        stop: int,
        query: np.ndarray,
        maps: np.ndarray,
        rows: np.ndarray,
        candidates: int,
        places: np.ndarray,
        bounds: np.ndarray,
        weights: np.ndarray,
        grad: np.ndarray,
    ) -> None:
        fours = query.shape[1] - query.shape[1] % 4
        for row in range(start, stop):
            x, out = rows[row], grad[row]
            out[:] = _ZERO
            for at in range(bounds[row], bounds[row + 1]):
                c, k = places[at] // candidates, places[at] % candidates
                q, m, w = query[c], maps[c], weights[c, :, k]
                for i in range(0, fours, 4):
                    four_w = w[i], w[i + 1], w[i + 2], w[i + 3]
                    four_q = q[i], q[i + 1], q[i + 2], q[i + 3]
                    four_m = m[i], m[i + 1], m[i + 2], m[i + 3]
                    add_four_to_row(four_w, four_q, four_m, x, out)
                for i in range(fours, query.shape[1]):
                    add_to_row(w[i], q[i], m[i], x, out)

    return of_rows


# Formulas of a kind, for a query q with its map m and a row x (D,): the scores of four rows; what
# four rows with weights w add to the gradients of q and m; what one query, or four, add to that of
# x. Sums of scores may run in vector lanes; gradients are added as written, which is as fast and
# keeps the signs of small differences that torch has.


def _sums(term: Any, slope: Any, is_mapped: bool = False, is_root: bool = False) -> Any:
    """Return the formulas of a score that is a sum of ``term(q_d, p_d)``, with p = x or m x.

    ``slope(w, a, b)`` is w times the derivative by a, where a is the query's element and b the
    row's, or the reverse. With ``is_root`` the score is the root of the sum.
    """
    term, slope = helper(term, fastmath=FUSED_SUMS), helper(slope)

    def compare(q: np.ndarray, m: np.ndarray, x: Any) -> Any:
        x0, x1, x2, x3 = x
        s0 = s1 = s2 = s3 = _ZERO
        for d in range(q.shape[0]):
            a, b = q[d], m[d] if is_mapped else _ONE
            s0 += term(a, b * x0[d])
            s1 += term(a, b * x1[d])
            s2 += term(a, b * x2[d])
            s3 += term(a, b * x3[d])
        if is_root:
            return np.sqrt(s0), np.sqrt(s1), np.sqrt(s2), np.sqrt(s3)
        return s0, s1, s2, s3

    def add_to_query(
        w: Any, q: np.ndarray, m: np.ndarray, x: Any, out: np.ndarray, out_map: np.ndarray
    ) -> None:
        (w0, w1, w2, w3), (x0, x1, x2, x3) = w, x
        for d in range(out.shape[0]):
            a, b = q[d], m[d] if is_mapped else _ONE
            g0, g1 = slope(w0, a, b * x0[d]), slope(w1, a, b * x1[d])
            g2, g3 = slope(w2, a, b * x2[d]), slope(w3, a, b * x3[d])
            out[d] += (g0 + g1) + (g2 + g3)
            if is_mapped:
                out_map[d] -= (x0[d] * g0 + x1[d] * g1) + (x2[d] * g2 + x3[d] * g3)

    def of_row(w: np.float32, q: np.ndarray, m: np.ndarray, x: np.ndarray, d: int) -> np.float32:
        return slope(w * m[d], m[d] * x[d], q[d]) if is_mapped else slope(w, x[d], q[d])

    of_row = helper(of_row)

    def add_to_row(
        w: np.float32, q: np.ndarray, m: np.ndarray, x: np.ndarray, out: np.ndarray
    ) -> None:
        for d in range(out.shape[0]):
            out[d] += of_row(w, q, m, x, d)

    def add_four_to_row(w: Any, q: Any, m: Any, x: np.ndarray, out: np.ndarray) -> None:
        (w0, w1, w2, w3), (q0, q1, q2, q3), (m0, m1, m2, m3) = w, q, m
        for d in range(out.shape[0]):
            near = of_row(w0, q0, m0, x, d) + of_row(w1, q1, m1, x, d)
            out[d] += near + (of_row(w2, q2, m2, x, d) + of_row(w3, q3, m3, x, d))

    of_queries_and_rows = helper(add_to_query), helper(add_to_row), helper(add_four_to_row)
    return helper(compare, fastmath=FUSED_SUMS), *of_queries_and_rows


@helper
def _sign(w: np.float32, a: np.float32, b: np.float32) -> np.float32:
    return w if a > b else (-w if a < b else _ZERO)


@helper
def _modulus(real: np.float32, imaginary: np.float32) -> np.float32:
    """Return the modulus of a complex number, with a finite gradient at 0."""
    return np.sqrt(real * real + imaginary * imaginary + _EPSILON)


@helper
def _distance(a: np.ndarray, b: np.ndarray, d: int) -> np.float32:
    return _modulus(a[2 * d] - b[2 * d], a[2 * d + 1] - b[2 * d + 1])


@helper
def _direction(w: np.float32, a: np.ndarray, b: np.ndarray, d: int) -> tuple[Any, Any]:
    """Return w times the direction of a complex difference."""
    real, imaginary = a[2 * d] - b[2 * d], a[2 * d + 1] - b[2 * d + 1]
    scale = w / _modulus(real, imaginary)
    return scale * real, scale * imaginary


@helper(fastmath=FUSED_SUMS)
def _compare_moduli(q: np.ndarray, m: np.ndarray, x: Any) -> Any:
    x0, x1, x2, x3 = x
    s0 = s1 = s2 = s3 = _ZERO
    for d in range(q.shape[0] // 2):
        s0 += _distance(q, x0, d)
        s1 += _distance(q, x1, d)
        s2 += _distance(q, x2, d)
        s3 += _distance(q, x3, d)
    return s0, s1, s2, s3


@helper
def _add_directions(w: Any, a: np.ndarray, b: Any, out: np.ndarray) -> None:
    (w0, w1, w2, w3), (b0, b1, b2, b3) = w, b
    for d in range(out.shape[0] // 2):
        (r0, i0), (r1, i1) = _direction(w0, a, b0, d), _direction(w1, a, b1, d)
        (r2, i2), (r3, i3) = _direction(w2, a, b2, d), _direction(w3, a, b3, d)
        out[2 * d] += (r0 + r1) + (r2 + r3)
        out[2 * d + 1] += (i0 + i1) + (i2 + i3)


@helper
def _add_direction(w: np.float32, q: Any, m: Any, x: np.ndarray, out: np.ndarray) -> None:
    for d in range(out.shape[0] // 2):
        real, imaginary = _direction(w, x, q, d)
        out[2 * d] += real
        out[2 * d + 1] += imaginary


_MODULI = (
    _compare_moduli,
    helper(lambda w, q, m, x, out, out_map: _add_directions(w, q, x, out)),
    _add_direction,
    helper(lambda w, q, m, x, out: _add_directions(w, x, q, out)),
)
_DISTANCE = (lambda a, b: abs(a - b)), (lambda w, a, b: _sign(w, a, b))
_SQUARE = (lambda a, b: (a - b) * (a - b)), (lambda w, a, b: w * (a - b))
FORMULAS = {
    "dot": _sums(lambda a, b: a * b, lambda w, a, b: w * b),
    "euclidean": _sums(*_SQUARE, is_root=True),
    "manhattan": _sums(*_DISTANCE),
    "moduli": _MODULI,
    "scaled_manhattan": _sums(*_DISTANCE, is_mapped=True),
    "scaled_squares": _sums(*_SQUARE, is_mapped=True),
}
