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
def _product(a: np.float32, x: np.float32) -> np.float32:
    return a * x


@helper(fastmath=FUSED_SUMS)
def _distance(a: np.float32, x: np.float32) -> np.float32:
    return abs(a - x)


@helper(fastmath=FUSED_SUMS)
def _square(a: np.float32, x: np.float32) -> np.float32:
    return (a - x) * (a - x)


def _sums(term: Any) -> Any:
    """Return the helper that sums a term of each element of a query (D,) and four rows (D,)."""

    def compare(q: np.ndarray, x: Rows) -> Scores:
        x0, x1, x2, x3 = x
        s0 = s1 = s2 = s3 = np.float32(0)
        for d in range(q.shape[0]):
            a = q[d]
            s0 += term(a, x0[d])
            s1 += term(a, x1[d])
            s2 += term(a, x2[d])
            s3 += term(a, x3[d])
        return s0, s1, s2, s3

    return helper(compare, fastmath=FUSED_SUMS)


def _scaled_sums(term: Any) -> Any:
    """Return the helper like ``_sums`` for rows that are scaled by the query's map (D,)."""

    def compare(q: np.ndarray, m: np.ndarray, x: Rows) -> Scores:
        x0, x1, x2, x3 = x
        s0 = s1 = s2 = s3 = np.float32(0)
        for d in range(q.shape[0]):
            a, b = q[d], m[d]
            s0 += term(a, b * x0[d])
            s1 += term(a, b * x1[d])
            s2 += term(a, b * x2[d])
            s3 += term(a, b * x3[d])
        return s0, s1, s2, s3

    return helper(compare, fastmath=FUSED_SUMS)


_sums_of_squares = _sums(_square)


@helper(fastmath=FUSED_SUMS)
def _compare_euclidean(q: np.ndarray, x: Rows) -> Scores:
    """Return Euclidean distances of a query (D,) and four rows (D,)."""
    s0, s1, s2, s3 = _sums_of_squares(q, x)
    return np.sqrt(s0), np.sqrt(s1), np.sqrt(s2), np.sqrt(s3)


@helper(fastmath=FUSED_SUMS)
def _compare_moduli(q: np.ndarray, x: Rows) -> Scores:
    """Return sums of the moduli of complex differences, like ``_compare_euclidean``."""
    x0, x1, x2, x3 = x
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(q.shape[0] // 2):
        a, b = q[2 * d], q[2 * d + 1]
        s0 += _modulus(a - x0[2 * d], b - x0[2 * d + 1])
        s1 += _modulus(a - x1[2 * d], b - x1[2 * d + 1])
        s2 += _modulus(a - x2[2 * d], b - x2[2 * d + 1])
        s3 += _modulus(a - x3[2 * d], b - x3[2 * d + 1])
    return s0, s1, s2, s3


@helper
def _modulus(real: np.float32, imaginary: np.float32) -> np.float32:
    """Return the modulus of a complex number, with a finite gradient at 0."""
    return np.sqrt(real * real + imaginary * imaginary + _EPSILON)


@helper
def _weighted_row(w: np.float32, a: np.float32, x: np.float32) -> np.float32:
    return w * x


@helper
def _weighted_difference(w: np.float32, a: np.float32, x: np.float32) -> np.float32:
    return w * (a - x)


@helper
def _weighted_sign(w: np.float32, a: np.float32, x: np.float32) -> np.float32:
    return w if a > x else (-w if a < x else np.float32(0))


def _adding(term: Any) -> Any:
    """Return the helper that adds a term of four weighted pairs to the gradient of one end (D,)."""

    def add(w: Weights, end: np.ndarray, x: Rows, total: np.ndarray) -> None:
        w0, w1, w2, w3 = w
        x0, x1, x2, x3 = x
        for d in range(total.shape[0]):
            a = end[d]
            near = term(w0, a, x0[d]) + term(w1, a, x1[d])
            total[d] += near + term(w2, a, x2[d]) + term(w3, a, x3[d])

    return helper(add)


_add_products = _adding(_weighted_row)
_add_differences = _adding(_weighted_difference)


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
    """Add w sign(end - x), like ``_add_products``; in pairs, which waits less for each other."""
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x
    for d in range(total.shape[0]):
        a = end[d]
        near = _weighted_sign(w0, a, x0[d]) + _weighted_sign(w1, a, x1[d])
        far = _weighted_sign(w2, a, x2[d]) + _weighted_sign(w3, a, x3[d])
        total[d] += near + far


def _adding_to_scaling_query(term: Any) -> Any:
    """Return the helper that adds four rows' terms to the gradients of a query and its map."""

    def add(
        w: Weights, q: np.ndarray, m: np.ndarray, x: Rows, total: np.ndarray, total_m: np.ndarray
    ) -> None:
        w0, w1, w2, w3 = w
        x0, x1, x2, x3 = x
        for d in range(total.shape[0]):
            a, b = q[d], m[d]
            r0, r1 = term(w0, a, b * x0[d]), term(w1, a, b * x1[d])
            r2, r3 = term(w2, a, b * x2[d]), term(w3, a, b * x3[d])
            total[d] += r0 + r1 + r2 + r3
            total_m[d] -= x0[d] * r0 + x1[d] * r1 + x2[d] * r2 + x3[d] * r3

    return helper(add)


def _adding_to_scaled_row(term: Any) -> Any:
    """Return the helper that adds the terms of four queries and maps to the gradient of a row."""

    def add(w: Weights, x: np.ndarray, q: Rows, m: Rows, total: np.ndarray) -> None:
        w0, w1, w2, w3 = w
        q0, q1, q2, q3 = q
        m0, m1, m2, m3 = m
        for d in range(total.shape[0]):
            a = x[d]
            near = term(w0 * m0[d], q0[d], m0[d] * a) + term(w1 * m1[d], q1[d], m1[d] * a)
            far = term(w2 * m2[d], q2[d], m2[d] * a) + term(w3 * m3[d], q3[d], m3[d] * a)
            total[d] -= near + far

    return helper(add)


class Formulas(NamedTuple):
    """The helpers of one kind."""

    compare: Any
    add_to_query: Any
    add_to_row: Any


FORMULAS = {
    "dot": Formulas(_sums(_product), _add_products, _add_products),
    "euclidean": Formulas(_compare_euclidean, _add_differences, _add_differences),
    "manhattan": Formulas(_sums(_distance), _add_signs, _add_signs),
    "moduli": Formulas(_compare_moduli, _add_directions, _add_directions),
    "scaled_manhattan": Formulas(
        _scaled_sums(_distance),
        _adding_to_scaling_query(_weighted_sign),
        _adding_to_scaled_row(_weighted_sign),
    ),
    "scaled_squares": Formulas(
        _scaled_sums(_square),
        _adding_to_scaling_query(_weighted_difference),
        _adding_to_scaled_row(_weighted_difference),
    ),
}
