"""Kernels that score pairs of a query and a row, and keep nothing for each pair.

**Forward** four rows meet a query at a time, which is then read once for all of them.

**Backward** every query, and after that every row, pulls in the gradients of its pairs, four at a
time: from (weight, other end) of each pair into one sum, which stays in the nearest cache.  What a
pair gives is computed twice, but each sum has one writer: no gradient is ever held for a pair, and
any number of threads gives the same bits.  The pairs of a row are found by a counting sort.

A pair's score depends on its own numbers alone, wherever it stands: the last rows of a query are
filled up to four by repeating one, so that all go through the same instructions.

The formulas are those of ``pair_scores``; ``_compare`` and the three ``_pull`` are all that knows
them.

Shapes: C chunks, b queries a chunk, K candidates a chunk, U rows, D numbers a row; M numbers of a
map, D or 0.
"""

from __future__ import annotations

import numpy as np

from kge_torchrec.kernels.blocks import block_kernel
from kge_torchrec.kernels.jit import FUSED_SUMS, helper
from kge_torchrec.kernels.kinds import EPSILON

# The kinds by their places among Comparison and Mapped of ``kinds``.
_DOT, EUCLIDEAN, _MANHATTAN, _MODULI, _SCALED_MANHATTAN, _SCALED_SQUARES, _HYPERPLANE = range(7)
_MAPPED = _SCALED_MANHATTAN  # the first of those with a map
SQUARES = (_SCALED_SQUARES, _HYPERPLANE)
_EPSILON = np.float32(EPSILON)

QUERIES = 16  # that a thread takes at once: what they hold stays in the nearest cache
ROWS = 16  # few, for threads to end together: some rows have more pairs than others
# A score's sum may run in vector lanes, products may be fused with it.  Nothing else is: gradients
# are added as they are written, which is as fast, and gives the same bits however a kernel is
# compiled, and the signs of small differences as torch has them.


@helper(fastmath=FUSED_SUMS)
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
    elif kind == EUCLIDEAN:
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


@helper(fastmath=FUSED_SUMS)
def _compare_mapped(
    kind: int,
    q: np.ndarray,
    m: np.ndarray,
    x0: np.ndarray,
    x1: np.ndarray,
    x2: np.ndarray,
    x3: np.ndarray,
) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """Scores of a query and its map, (D,) each, and four rows (D,)."""
    s0 = s1 = s2 = s3 = np.float32(0)
    if kind == _SCALED_MANHATTAN:
        for d in range(q.shape[0]):
            a, b = q[d], m[d]
            s0 += abs(a - b * x0[d])
            s1 += abs(a - b * x1[d])
            s2 += abs(a - b * x2[d])
            s3 += abs(a - b * x3[d])
    elif kind == _SCALED_SQUARES:
        for d in range(q.shape[0]):
            a, b = q[d], m[d]
            s0 += (a - b * x0[d]) * (a - b * x0[d])
            s1 += (a - b * x1[d]) * (a - b * x1[d])
            s2 += (a - b * x2[d]) * (a - b * x2[d])
            s3 += (a - b * x3[d]) * (a - b * x3[d])
    else:
        along0, along1 = _along(m, q, x0), _along(m, q, x1)
        along2, along3 = _along(m, q, x2), _along(m, q, x3)
        for d in range(q.shape[0]):
            a, b = q[d], m[d]
            s0 += _beside(a, x0[d], along0, b) ** 2
            s1 += _beside(a, x1[d], along1, b) ** 2
            s2 += _beside(a, x2[d], along2, b) ** 2
            s3 += _beside(a, x3[d], along3, b) ** 2
    return s0, s1, s2, s3


@helper
def _modulus(real: np.float32, imaginary: np.float32) -> np.float32:
    return np.sqrt(real * real + imaginary * imaginary + _EPSILON)


@helper(fastmath=FUSED_SUMS)
def _along(normal: np.ndarray, end: np.ndarray, other: np.ndarray) -> np.float32:
    """The part of the difference of two ends that lies along the normal.

    What it leaves is summed up in a pass of its own: |d|^2 - <m, d>^2 is shorter, but of two close
    numbers where d is nearly along m, as it is for triples that hold.
    """
    total = np.float32(0)
    for d in range(normal.shape[0]):
        total += normal[d] * (end[d] - other[d])
    return total


@helper
def _beside(
    end: np.float32, other: np.float32, along: np.float32, normal: np.float32
) -> np.float32:
    """A number of what is left; the ends first, which may be close to each other and large."""
    return (end - other) - along * normal


@block_kernel(1)
def score_blocks(
    start: int,
    stop: int,
    kind: int,
    query: np.ndarray,
    maps: np.ndarray,
    rows: np.ndarray,
    index: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Blocks of ``QUERIES`` queries, counted through all chunks."""
    count, last = query.shape[1], index.shape[1] - 1
    per_chunk = (count + QUERIES - 1) // QUERIES
    for block in range(start, stop):
        c, first = block // per_chunk, block % per_chunk * QUERIES
        picked = index[c]
        for k in range(0, last + 1, 4):
            k1, k2, k3 = min(k + 1, last), min(k + 2, last), min(k + 3, last)
            x0, x1, x2, x3 = rows[picked[k]], rows[picked[k1]], rows[picked[k2]], rows[picked[k3]]
            for i in range(first, min(first + QUERIES, count)):
                if kind < _MAPPED:
                    found = _compare(kind, query[c, i], x0, x1, x2, x3)
                else:
                    found = _compare_mapped(kind, query[c, i], maps[c, i], x0, x1, x2, x3)
                out = scores[c, i]
                out[k], out[k1], out[k2], out[k3] = found


@helper
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
    elif kind == EUCLIDEAN:
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


@helper
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


@helper
def _pull_from_mapped(
    kind: int,
    w0: np.float32,
    w1: np.float32,
    w2: np.float32,
    w3: np.float32,
    q: np.ndarray,
    m: np.ndarray,
    x0: np.ndarray,
    x1: np.ndarray,
    x2: np.ndarray,
    x3: np.ndarray,
    total: np.ndarray,
    total_m: np.ndarray,
) -> None:
    """``_pull`` of a query and of its map, (D,) each, from four rows."""
    if kind == _HYPERPLANE:  # for w (d - <m, d> m) and -<m, d> times that, terms of d, then of m
        a0, a1, a2, a3 = _along(m, q, x0), _along(m, q, x1), _along(m, q, x2), _along(m, q, x3)
        v0, v1, v2, v3 = w0 * a0, w1 * a1, w2 * a2, w3 * a3
        _pull(EUCLIDEAN, w0, w1, w2, w3, q, x0, x1, x2, x3, total)
        _pull(EUCLIDEAN, -v0, -v1, -v2, -v3, q, x0, x1, x2, x3, total_m)
        of_query, of_map = v0 + v1 + v2 + v3, v0 * a0 + v1 * a1 + v2 * a2 + v3 * a3
        for d in range(total.shape[0]):
            total[d] -= of_query * m[d]
            total_m[d] += of_map * m[d]
    elif kind == _SCALED_SQUARES:
        for d in range(total.shape[0]):
            a, b = q[d], m[d]
            r0, r1 = w0 * (a - b * x0[d]), w1 * (a - b * x1[d])
            r2, r3 = w2 * (a - b * x2[d]), w3 * (a - b * x3[d])
            total[d] += r0 + r1 + r2 + r3
            total_m[d] -= x0[d] * r0 + x1[d] * r1 + x2[d] * r2 + x3[d] * r3
    else:
        for d in range(total.shape[0]):
            a, b = q[d], m[d]
            r0, r1 = _signed(w0, a, b, x0[d]), _signed(w1, a, b, x1[d])
            r2, r3 = _signed(w2, a, b, x2[d]), _signed(w3, a, b, x3[d])
            total[d] += r0 + r1 + r2 + r3
            total_m[d] -= x0[d] * r0 + x1[d] * r1 + x2[d] * r2 + x3[d] * r3


@helper
def _pull_into_mapped(
    kind: int,
    w0: np.float32,
    w1: np.float32,
    w2: np.float32,
    w3: np.float32,
    x: np.ndarray,
    q0: np.ndarray,
    q1: np.ndarray,
    q2: np.ndarray,
    q3: np.ndarray,
    m0: np.ndarray,
    m1: np.ndarray,
    m2: np.ndarray,
    m3: np.ndarray,
    total: np.ndarray,
) -> None:
    """``_pull`` of a row (D,) from four queries and their maps."""
    if kind == _HYPERPLANE:
        v0, v1 = w0 * _along(m0, x, q0), w1 * _along(m1, x, q1)
        v2, v3 = w2 * _along(m2, x, q2), w3 * _along(m3, x, q3)
        _pull(EUCLIDEAN, w0, w1, w2, w3, x, q0, q1, q2, q3, total)
        _pull(_DOT, -v0, -v1, -v2, -v3, x, m0, m1, m2, m3, total)
    elif kind == _SCALED_SQUARES:
        for d in range(total.shape[0]):
            a = x[d]
            near = w0 * m0[d] * (q0[d] - m0[d] * a) + w1 * m1[d] * (q1[d] - m1[d] * a)
            far = w2 * m2[d] * (q2[d] - m2[d] * a) + w3 * m3[d] * (q3[d] - m3[d] * a)
            total[d] -= near + far
    else:
        for d in range(total.shape[0]):
            a = x[d]
            near = m0[d] * _signed(w0, q0[d], m0[d], a) + m1[d] * _signed(w1, q1[d], m1[d], a)
            far = m2[d] * _signed(w2, q2[d], m2[d], a) + m3[d] * _signed(w3, q3[d], m3[d], a)
            total[d] -= near + far


@helper
def _signed(weight: np.float32, q: np.float32, m: np.float32, x: np.float32) -> np.float32:
    """The weight with the sign of q - m x."""
    mapped = m * x
    return weight if q > mapped else (-weight if q < mapped else np.float32(0))


@block_kernel(1)
def pull_into_queries(
    start: int,
    stop: int,
    kind: int,
    query: np.ndarray,
    maps: np.ndarray,
    rows: np.ndarray,
    index: np.ndarray,
    weights: np.ndarray,
    grad: np.ndarray,
    grad_maps: np.ndarray,
) -> None:
    """Blocks as ``score_blocks``."""
    count, last, none = query.shape[1], index.shape[1] - 1, np.float32(0)
    per_chunk = (count + QUERIES - 1) // QUERIES
    for block in range(start, stop):
        c, first = block // per_chunk, block % per_chunk * QUERIES
        picked, end = index[c], min(first + QUERIES, count)
        grad[c, first:end] = none
        grad_maps[c, first:end] = none
        for k in range(0, last + 1, 4):
            k1, k2, k3 = min(k + 1, last), min(k + 2, last), min(k + 3, last)
            x0, x1, x2, x3 = rows[picked[k]], rows[picked[k1]], rows[picked[k2]], rows[picked[k3]]
            for i in range(first, end):
                w = weights[c, i]
                w0 = w[k]
                w1 = w[k1] if k1 > k else none
                w2 = w[k2] if k2 > k1 else none
                w3 = w[k3] if k3 > k2 else none
                q, total = query[c, i], grad[c, i]
                if kind == _MANHATTAN:
                    _pull_signs(w0, w1, w2, w3, q, x0, x1, x2, x3, total)
                elif kind < _MAPPED:
                    _pull(kind, w0, w1, w2, w3, q, x0, x1, x2, x3, total)
                else:
                    m, total_m = maps[c, i], grad_maps[c, i]
                    _pull_from_mapped(kind, w0, w1, w2, w3, q, m, x0, x1, x2, x3, total, total_m)


@block_kernel(ROWS)
def pull_into_rows(
    start: int,
    stop: int,
    kind: int,
    query: np.ndarray,
    maps: np.ndarray,
    rows: np.ndarray,
    candidates: int,
    places: np.ndarray,
    bounds: np.ndarray,
    weights: np.ndarray,
    grad: np.ndarray,
) -> None:
    # The pairs of a row that wait to be four: their queries' chunks and places, and weights.
    chunk, place = np.zeros(4, np.int64), np.zeros(4, np.int64)
    weight = np.zeros(4, np.float32)
    for row in range(start, stop):
        waiting = 0
        grad[row] = np.float32(0)
        for at in range(bounds[row], bounds[row + 1]):
            c, k = places[at] // candidates, places[at] % candidates
            for i in range(query.shape[1]):
                chunk[waiting], place[waiting], weight[waiting] = c, i, weights[c, i, k]
                waiting += 1
                if waiting == 4:
                    _pull_four(kind, chunk, place, weight, query, maps, rows[row], grad[row])
                    waiting = 0
        if waiting > 0:
            weight[waiting:] = np.float32(0)
            _pull_four(kind, chunk, place, weight, query, maps, rows[row], grad[row])


@helper
def _pull_four(
    kind: int,
    chunk: np.ndarray,
    place: np.ndarray,
    weight: np.ndarray,
    query: np.ndarray,
    maps: np.ndarray,
    row: np.ndarray,
    total: np.ndarray,
) -> None:
    q0, q1 = query[chunk[0], place[0]], query[chunk[1], place[1]]
    q2, q3 = query[chunk[2], place[2]], query[chunk[3], place[3]]
    w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
    if kind == _MANHATTAN:
        _pull_signs(w0, w1, w2, w3, row, q0, q1, q2, q3, total)
    elif kind < _MAPPED:
        _pull(kind, w0, w1, w2, w3, row, q0, q1, q2, q3, total)
    else:
        m0, m1 = maps[chunk[0], place[0]], maps[chunk[1], place[1]]
        m2, m3 = maps[chunk[2], place[2]], maps[chunk[3], place[3]]
        _pull_into_mapped(kind, w0, w1, w2, w3, row, q0, q1, q2, q3, m0, m1, m2, m3, total)
