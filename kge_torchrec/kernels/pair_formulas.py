"""Formulas of the pair kernels: scores and gradients of one end with four others, for each kind.

A score's sum may run in vector lanes, and products may be fused with it.  Gradients allow neither:
they are added as they are written, which is as fast, and gives the same bits however a kernel is
compiled, and the signs of small differences as torch has them.

Shapes: D elements per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kge_torchrec.kernels.jit import FUSED_SUMS, helper
from kge_torchrec.kernels.kinds import EPSILON

_EPSILON = np.float32(EPSILON)
Scores = tuple[np.float32, np.float32, np.float32, np.float32]


@helper(fastmath=FUSED_SUMS)
def _compare_dot(
    q: np.ndarray, x0: np.ndarray, x1: np.ndarray, x2: np.ndarray, x3: np.ndarray
) -> Scores:
    """Return the inner products of a query (D,) and four rows (D,)."""
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0]):
        a = q[d]
        s0 += a * x0[d]
        s1 += a * x1[d]
        s2 += a * x2[d]
        s3 += a * x3[d]
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_manhattan(
    q: np.ndarray, x0: np.ndarray, x1: np.ndarray, x2: np.ndarray, x3: np.ndarray
) -> Scores:
    """Return Manhattan distances, as ``_compare_dot``."""
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0]):
        a = q[d]
        s0 += abs(a - x0[d])
        s1 += abs(a - x1[d])
        s2 += abs(a - x2[d])
        s3 += abs(a - x3[d])
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_euclidean(
    q: np.ndarray, x0: np.ndarray, x1: np.ndarray, x2: np.ndarray, x3: np.ndarray
) -> Scores:
    """Return Euclidean distances, as ``_compare_dot``."""
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0]):
        a = q[d]
        s0 += (a - x0[d]) * (a - x0[d])
        s1 += (a - x1[d]) * (a - x1[d])
        s2 += (a - x2[d]) * (a - x2[d])
        s3 += (a - x3[d]) * (a - x3[d])
    s0, s1, s2, s3 = np.sqrt(s0), np.sqrt(s1), np.sqrt(s2), np.sqrt(s3)
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_moduli(
    q: np.ndarray, x0: np.ndarray, x1: np.ndarray, x2: np.ndarray, x3: np.ndarray
) -> Scores:
    """Return sums of the moduli of complex differences, as ``_compare_dot``."""
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0] // 2):
        a, b = q[2 * d], q[2 * d + 1]
        s0 += _modulus(a - x0[2 * d], b - x0[2 * d + 1])
        s1 += _modulus(a - x1[2 * d], b - x1[2 * d + 1])
        s2 += _modulus(a - x2[2 * d], b - x2[2 * d + 1])
        s3 += _modulus(a - x3[2 * d], b - x3[2 * d + 1])
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_scaled_manhattan(
    q: np.ndarray,
    m: np.ndarray,
    x0: np.ndarray,
    x1: np.ndarray,
    x2: np.ndarray,
    x3: np.ndarray,
) -> Scores:
    """Return Manhattan distances of a query (D,) and four rows (D,) scaled by its map (D,)."""
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0]):
        a, b = q[d], m[d]
        s0 += abs(a - b * x0[d])
        s1 += abs(a - b * x1[d])
        s2 += abs(a - b * x2[d])
        s3 += abs(a - b * x3[d])
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_scaled_squares(
    q: np.ndarray,
    m: np.ndarray,
    x0: np.ndarray,
    x1: np.ndarray,
    x2: np.ndarray,
    x3: np.ndarray,
) -> Scores:
    """Return squared distances, as ``_compare_scaled_manhattan``."""
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0]):
        a, b = q[d], m[d]
        s0 += (a - b * x0[d]) * (a - b * x0[d])
        s1 += (a - b * x1[d]) * (a - b * x1[d])
        s2 += (a - b * x2[d]) * (a - b * x2[d])
        s3 += (a - b * x3[d]) * (a - b * x3[d])
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_hyperplane(
    q: np.ndarray,
    m: np.ndarray,
    x0: np.ndarray,
    x1: np.ndarray,
    x2: np.ndarray,
    x3: np.ndarray,
) -> Scores:
    """Return squared distances on the hyperplane whose normal is the map."""
    s0 = s1 = s2 = s3 = np.float32(0)
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


@helper
def _pull_products(
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
    """Add to the gradient of one end (D,) what four weighted pairs give it: w x."""
    for d in range(total.shape[0]):
        total[d] += w0 * x0[d] + w1 * x1[d] + w2 * x2[d] + w3 * x3[d]


@helper
def _pull_differences(
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
    """Add w (end - x), as ``_pull_products``."""
    for d in range(total.shape[0]):
        a = end[d]
        near = w0 * (a - x0[d]) + w1 * (a - x1[d])
        total[d] += near + w2 * (a - x2[d]) + w3 * (a - x3[d])


@helper
def _pull_moduli(
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
    """Add w times the directions of complex differences, as ``_pull_products``."""
    for d in range(total.shape[0] // 2):
        a, b = end[2 * d], end[2 * d + 1]
        real0, imaginary0 = a - x0[2 * d], b - x0[2 * d + 1]
        real1, imaginary1 = a - x1[2 * d], b - x1[2 * d + 1]
        real2, imaginary2 = a - x2[2 * d], b - x2[2 * d + 1]
        real3, imaginary3 = a - x3[2 * d], b - x3[2 * d + 1]
        v0, v1 = w0 / _modulus(real0, imaginary0), w1 / _modulus(real1, imaginary1)
        v2, v3 = w2 / _modulus(real2, imaginary2), w3 / _modulus(real3, imaginary3)
        total[2 * d] += v0 * real0 + v1 * real1 + v2 * real2 + v3 * real3
        total[2 * d + 1] += v0 * imaginary0 + v1 * imaginary1 + v2 * imaginary2 + v3 * imaginary3


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
    """Add w sign(end - x), as ``_pull_products``."""
    none = np.float32(0)
    for d in range(total.shape[0]):
        a = end[d]
        s0 = w0 if a > x0[d] else (-w0 if a < x0[d] else none)
        s1 = w1 if a > x1[d] else (-w1 if a < x1[d] else none)
        s2 = w2 if a > x2[d] else (-w2 if a < x2[d] else none)
        s3 = w3 if a > x3[d] else (-w3 if a < x3[d] else none)
        total[d] += (s0 + s1) + (s2 + s3)


@helper
def _query_of_hyperplane(
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
    """Add to the gradients of a query and its map, (D,) each, what four rows give them."""
    # for w (d - <m, d> m) and -<m, d> times that, terms of d, then of m
    a0, a1, a2, a3 = _along(m, q, x0), _along(m, q, x1), _along(m, q, x2), _along(m, q, x3)
    v0, v1, v2, v3 = w0 * a0, w1 * a1, w2 * a2, w3 * a3
    _pull_differences(w0, w1, w2, w3, q, x0, x1, x2, x3, total)
    _pull_differences(-v0, -v1, -v2, -v3, q, x0, x1, x2, x3, total_m)
    of_query, of_map = v0 + v1 + v2 + v3, v0 * a0 + v1 * a1 + v2 * a2 + v3 * a3
    for d in range(total.shape[0]):
        total[d] -= of_query * m[d]
        total_m[d] += of_map * m[d]


@helper
def _query_of_scaled_squares(
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
    """Add to the gradients of a query and its map, (D,) each, what four rows give them."""
    for d in range(total.shape[0]):
        a, b = q[d], m[d]
        r0, r1 = w0 * (a - b * x0[d]), w1 * (a - b * x1[d])
        r2, r3 = w2 * (a - b * x2[d]), w3 * (a - b * x3[d])
        total[d] += r0 + r1 + r2 + r3
        total_m[d] -= x0[d] * r0 + x1[d] * r1 + x2[d] * r2 + x3[d] * r3


@helper
def _query_of_scaled_manhattan(
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
    """Add to the gradients of a query and its map, (D,) each, what four rows give them."""
    for d in range(total.shape[0]):
        a, b = q[d], m[d]
        r0, r1 = _signed(w0, a, b, x0[d]), _signed(w1, a, b, x1[d])
        r2, r3 = _signed(w2, a, b, x2[d]), _signed(w3, a, b, x3[d])
        total[d] += r0 + r1 + r2 + r3
        total_m[d] -= x0[d] * r0 + x1[d] * r1 + x2[d] * r2 + x3[d] * r3


@helper
def _row_of_hyperplane(
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
    """Add to the gradient of a row (D,) what four queries and their maps give it."""
    v0, v1 = w0 * _along(m0, x, q0), w1 * _along(m1, x, q1)
    v2, v3 = w2 * _along(m2, x, q2), w3 * _along(m3, x, q3)
    _pull_differences(w0, w1, w2, w3, x, q0, q1, q2, q3, total)
    _pull_products(-v0, -v1, -v2, -v3, x, m0, m1, m2, m3, total)


@helper
def _row_of_scaled_squares(
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
    """Add to the gradient of a row (D,) what four queries and their maps give it."""
    for d in range(total.shape[0]):
        a = x[d]
        near = w0 * m0[d] * (q0[d] - m0[d] * a) + w1 * m1[d] * (q1[d] - m1[d] * a)
        far = w2 * m2[d] * (q2[d] - m2[d] * a) + w3 * m3[d] * (q3[d] - m3[d] * a)
        total[d] -= near + far


@helper
def _row_of_scaled_manhattan(
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
    """Add to the gradient of a row (D,) what four queries and their maps give it."""
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


class Formulas(NamedTuple):
    """The helpers of one kind."""

    compare: Any
    pull_into_query: Any
    pull_into_row: Any


FORMULAS = {
    "dot": Formulas(_compare_dot, _pull_products, _pull_products),
    "euclidean": Formulas(_compare_euclidean, _pull_differences, _pull_differences),
    "manhattan": Formulas(_compare_manhattan, _pull_signs, _pull_signs),
    "moduli": Formulas(_compare_moduli, _pull_moduli, _pull_moduli),
    "scaled_manhattan": Formulas(
        _compare_scaled_manhattan, _query_of_scaled_manhattan, _row_of_scaled_manhattan
    ),
    "scaled_squares": Formulas(
        _compare_scaled_squares, _query_of_scaled_squares, _row_of_scaled_squares
    ),
    "hyperplane_squares": Formulas(_compare_hyperplane, _query_of_hyperplane, _row_of_hyperplane),
}
