"""Formulas of ``pair_scores``: scores and gradients of one end with four others, for each kind.

A score's sum may run in vector lanes, and products may be fused with it. Gradients allow neither:
they are added as they are written, which is as fast, gives the same bits however a kernel is
compiled, and keeps the signs of small differences that torch has.

Shapes: D elements per row. Arguments w (weights), x (rows), and q and m where a row accumulates,
are tuples of four.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kge_torchrec.kernels.jit import FUSED_SUMS, helper
from kge_torchrec.kernels.library import EPSILON

_EPSILON = np.float32(EPSILON)
Weights = tuple[np.float32, np.float32, np.float32, np.float32]
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Scores = Weights


@helper(fastmath=FUSED_SUMS)
def _compare_dot(q: np.ndarray, x: Rows) -> Scores:
    """Return the inner products of a query (D,) and four rows (D,)."""
    x0, x1, x2, x3 = x
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0]):
        a = q[d]
        s0 += a * x0[d]
        s1 += a * x1[d]
        s2 += a * x2[d]
        s3 += a * x3[d]
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_manhattan(q: np.ndarray, x: Rows) -> Scores:
    """Return Manhattan distances, like ``_compare_dot``."""
    x0, x1, x2, x3 = x
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0]):
        a = q[d]
        s0 += abs(a - x0[d])
        s1 += abs(a - x1[d])
        s2 += abs(a - x2[d])
        s3 += abs(a - x3[d])
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_euclidean(q: np.ndarray, x: Rows) -> Scores:
    """Return Euclidean distances, like ``_compare_dot``."""
    x0, x1, x2, x3 = x
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
def _compare_moduli(q: np.ndarray, x: Rows) -> Scores:
    """Return sums of the moduli of complex differences, like ``_compare_dot``."""
    x0, x1, x2, x3 = x
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0] // 2):
        a, b = q[2 * d], q[2 * d + 1]
        s0 += _modulus(a - x0[2 * d], b - x0[2 * d + 1])
        s1 += _modulus(a - x1[2 * d], b - x1[2 * d + 1])
        s2 += _modulus(a - x2[2 * d], b - x2[2 * d + 1])
        s3 += _modulus(a - x3[2 * d], b - x3[2 * d + 1])
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_scaled_manhattan(q: np.ndarray, m: np.ndarray, x: Rows) -> Scores:
    """Return Manhattan distances of a query (D,) and four rows (D,) scaled by its map (D,)."""
    x0, x1, x2, x3 = x
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0]):
        a, b = q[d], m[d]
        s0 += abs(a - b * x0[d])
        s1 += abs(a - b * x1[d])
        s2 += abs(a - b * x2[d])
        s3 += abs(a - b * x3[d])
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_scaled_squares(q: np.ndarray, m: np.ndarray, x: Rows) -> Scores:
    """Return squared distances, like ``_compare_scaled_manhattan``."""
    x0, x1, x2, x3 = x
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0]):
        a, b = q[d], m[d]
        s0 += (a - b * x0[d]) * (a - b * x0[d])
        s1 += (a - b * x1[d]) * (a - b * x1[d])
        s2 += (a - b * x2[d]) * (a - b * x2[d])
        s3 += (a - b * x3[d]) * (a - b * x3[d])
    return s0, s1, s2, s3


@helper(fastmath=FUSED_SUMS)
def _compare_hyperplane(q: np.ndarray, m: np.ndarray, x: Rows) -> Scores:
    """Return squared distances on the hyperplane whose normal is the map."""
    x0, x1, x2, x3 = x
    s0 = s1 = s2 = s3 = np.float32(0)
    p0, p1 = _projection(m, q, x0), _projection(m, q, x1)
    p2, p3 = _projection(m, q, x2), _projection(m, q, x3)
    for d in range(q.shape[0]):
        a, b = q[d], m[d]
        s0 += _rejection(a, x0[d], p0, b) ** 2
        s1 += _rejection(a, x1[d], p1, b) ** 2
        s2 += _rejection(a, x2[d], p2, b) ** 2
        s3 += _rejection(a, x3[d], p3, b) ** 2
    return s0, s1, s2, s3


@helper
def _modulus(real: np.float32, imaginary: np.float32) -> np.float32:
    """Return the modulus of a complex number, with a finite gradient at 0."""
    return np.sqrt(real * real + imaginary * imaginary + _EPSILON)


@helper(fastmath=FUSED_SUMS)
def _projection(normal: np.ndarray, end: np.ndarray, other: np.ndarray) -> np.float32:
    """Return <m, d>, the length of the projection of two ends' difference d onto the normal m.

    The rejection is summed in a second pass: |d|^2 - <m, d>^2 is shorter, but a difference of two
    close numbers where d is nearly parallel to m, as it is for triples that hold.
    """
    total = np.float32(0)
    for d in range(normal.shape[0]):
        total += normal[d] * (end[d] - other[d])
    return total


@helper
def _rejection(
    end: np.float32, other: np.float32, projection: np.float32, normal: np.float32
) -> np.float32:
    """Return an element of the rejection; the ends first, which may be close and large."""
    return (end - other) - projection * normal


@helper
def _add_products(w: Weights, end: np.ndarray, x: Rows, total: np.ndarray) -> None:
    """Add w x of four weighted pairs to the gradient of one end (D,)."""
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x
    for d in range(total.shape[0]):
        total[d] += w0 * x0[d] + w1 * x1[d] + w2 * x2[d] + w3 * x3[d]


@helper
def _add_differences(w: Weights, end: np.ndarray, x: Rows, total: np.ndarray) -> None:
    """Add w (end - x), like ``_add_products``."""
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x
    for d in range(total.shape[0]):
        a = end[d]
        near = w0 * (a - x0[d]) + w1 * (a - x1[d])
        total[d] += near + w2 * (a - x2[d]) + w3 * (a - x3[d])


@helper
def _add_directions(w: Weights, end: np.ndarray, x: Rows, total: np.ndarray) -> None:
    """Add w times the directions of complex differences, like ``_add_products``."""
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x
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
def _add_signs(w: Weights, end: np.ndarray, x: Rows, total: np.ndarray) -> None:
    """Add w sign(end - x), like ``_add_products``."""
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x
    none = np.float32(0)
    for d in range(total.shape[0]):
        a = end[d]
        s0 = w0 if a > x0[d] else (-w0 if a < x0[d] else none)
        s1 = w1 if a > x1[d] else (-w1 if a < x1[d] else none)
        s2 = w2 if a > x2[d] else (-w2 if a < x2[d] else none)
        s3 = w3 if a > x3[d] else (-w3 if a < x3[d] else none)
        total[d] += (s0 + s1) + (s2 + s3)


@helper
def _add_to_query_hyperplane(
    w: Weights, q: np.ndarray, m: np.ndarray, x: Rows, total: np.ndarray, total_m: np.ndarray
) -> None:
    """Add the terms of four rows to the gradients of a query and its map, (D,) each."""
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x
    # The terms of d, then those of m, of w (d - <m, d> m) and of -<m, d> times that.
    a0, a1, a2, a3 = (
        _projection(m, q, x0),
        _projection(m, q, x1),
        _projection(m, q, x2),
        _projection(m, q, x3),
    )
    v0, v1, v2, v3 = w0 * a0, w1 * a1, w2 * a2, w3 * a3
    _add_differences(w, q, x, total)
    _add_differences((-v0, -v1, -v2, -v3), q, x, total_m)
    sum_query, sum_map = v0 + v1 + v2 + v3, v0 * a0 + v1 * a1 + v2 * a2 + v3 * a3
    for d in range(total.shape[0]):
        total[d] -= sum_query * m[d]
        total_m[d] += sum_map * m[d]


@helper
def _add_to_query_scaled_squares(
    w: Weights, q: np.ndarray, m: np.ndarray, x: Rows, total: np.ndarray, total_m: np.ndarray
) -> None:
    """Add the terms of four rows to the gradients of a query and its map, (D,) each."""
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x
    for d in range(total.shape[0]):
        a, b = q[d], m[d]
        r0, r1 = w0 * (a - b * x0[d]), w1 * (a - b * x1[d])
        r2, r3 = w2 * (a - b * x2[d]), w3 * (a - b * x3[d])
        total[d] += r0 + r1 + r2 + r3
        total_m[d] -= x0[d] * r0 + x1[d] * r1 + x2[d] * r2 + x3[d] * r3


@helper
def _add_to_query_scaled_manhattan(
    w: Weights, q: np.ndarray, m: np.ndarray, x: Rows, total: np.ndarray, total_m: np.ndarray
) -> None:
    """Add the terms of four rows to the gradients of a query and its map, (D,) each."""
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x
    for d in range(total.shape[0]):
        a, b = q[d], m[d]
        r0, r1 = _signed(w0, a, b, x0[d]), _signed(w1, a, b, x1[d])
        r2, r3 = _signed(w2, a, b, x2[d]), _signed(w3, a, b, x3[d])
        total[d] += r0 + r1 + r2 + r3
        total_m[d] -= x0[d] * r0 + x1[d] * r1 + x2[d] * r2 + x3[d] * r3


@helper
def _add_to_row_hyperplane(w: Weights, x: np.ndarray, q: Rows, m: Rows, total: np.ndarray) -> None:
    """Add the terms of four queries and their maps to the gradient of a row (D,)."""
    w0, w1, w2, w3 = w
    q0, q1, q2, q3 = q
    m0, m1, m2, m3 = m
    v0, v1 = w0 * _projection(m0, x, q0), w1 * _projection(m1, x, q1)
    v2, v3 = w2 * _projection(m2, x, q2), w3 * _projection(m3, x, q3)
    _add_differences(w, x, q, total)
    _add_products((-v0, -v1, -v2, -v3), x, m, total)


@helper
def _add_to_row_scaled_squares(
    w: Weights, x: np.ndarray, q: Rows, m: Rows, total: np.ndarray
) -> None:
    """Add the terms of four queries and their maps to the gradient of a row (D,)."""
    w0, w1, w2, w3 = w
    q0, q1, q2, q3 = q
    m0, m1, m2, m3 = m
    for d in range(total.shape[0]):
        a = x[d]
        near = w0 * m0[d] * (q0[d] - m0[d] * a) + w1 * m1[d] * (q1[d] - m1[d] * a)
        far = w2 * m2[d] * (q2[d] - m2[d] * a) + w3 * m3[d] * (q3[d] - m3[d] * a)
        total[d] -= near + far


@helper
def _add_to_row_scaled_manhattan(
    w: Weights, x: np.ndarray, q: Rows, m: Rows, total: np.ndarray
) -> None:
    """Add the terms of four queries and their maps to the gradient of a row (D,)."""
    w0, w1, w2, w3 = w
    q0, q1, q2, q3 = q
    m0, m1, m2, m3 = m
    for d in range(total.shape[0]):
        a = x[d]
        near = m0[d] * _signed(w0, q0[d], m0[d], a) + m1[d] * _signed(w1, q1[d], m1[d], a)
        far = m2[d] * _signed(w2, q2[d], m2[d], a) + m3[d] * _signed(w3, q3[d], m3[d], a)
        total[d] -= near + far


@helper
def _signed(weight: np.float32, q: np.float32, m: np.float32, x: np.float32) -> np.float32:
    """Return the weight with the sign of q - m x."""
    mapped = m * x
    return weight if q > mapped else (-weight if q < mapped else np.float32(0))


class Formulas(NamedTuple):
    """The helpers of one kind."""

    compare: Any
    add_to_query: Any
    add_to_row: Any


FORMULAS = {
    "dot": Formulas(_compare_dot, _add_products, _add_products),
    "euclidean": Formulas(_compare_euclidean, _add_differences, _add_differences),
    "manhattan": Formulas(_compare_manhattan, _add_signs, _add_signs),
    "moduli": Formulas(_compare_moduli, _add_directions, _add_directions),
    "scaled_manhattan": Formulas(
        _compare_scaled_manhattan, _add_to_query_scaled_manhattan, _add_to_row_scaled_manhattan
    ),
    "scaled_squares": Formulas(
        _compare_scaled_squares, _add_to_query_scaled_squares, _add_to_row_scaled_squares
    ),
    "hyperplane_squares": Formulas(
        _compare_hyperplane, _add_to_query_hyperplane, _add_to_row_hyperplane
    ),
}
