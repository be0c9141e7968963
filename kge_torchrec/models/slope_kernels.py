"""Slopes of the logistic loss over all entities, on a CPU: each score is read and written once.

Operations of torch one after another would move all scores for each of them, and its logarithm
takes numbers one by one.  Exponential and logarithm are polynomials here, since compilers make
vectors of those (Cody and Waite 1980 have the reduction): right to 3e-7.

Shapes: Q queries, m entities of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from kge_torchrec.models.row_sums import JIT, threads_for

# A product and a sum at once.  Sums keep their order, whatever a function is compiled into.
_FAST: dict[str, Any] = {**JIT, "fastmath": {"contract"}}
_F = np.float32  # a number that is not one would make all others double


def logistic_slopes(scores: Tensor, normalizer: Tensor) -> None:
    """Overwrites scores (Q, m) by their sigmoids, and (Q,) by sum log(1 + exp s).

    Both are float32 and contiguous.
    """
    arrays = scores.numpy(), normalizer.numpy()
    if threads_for(len(scores), scores.numel()) == 1:
        _logistic(0, len(scores), *arrays)
    else:
        _logistic_in_parallel(*arrays)


@njit(**_FAST)
def _logistic(start: int, stop: int, scores: np.ndarray, total: np.ndarray) -> None:
    losses = np.empty(scores.shape[1], np.float32)
    for q in range(start, stop):
        row = scores[q]
        for j in range(row.shape[0]):
            score = row[j]
            small = _exp(-abs(score))
            losses[j] = max(score, _F(0)) + _log1p(small)
            row[j] = (_F(1) if score >= 0 else small) / (_F(1) + small)
        total[q] = _sum(losses)


@njit(parallel=True, **_FAST)
def _logistic_in_parallel(scores: np.ndarray, total: np.ndarray) -> None:
    for q in prange(scores.shape[0]):
        _logistic(q, q + 1, scores, total)


@njit(**_FAST)
def _sum(row: np.ndarray) -> np.float32:
    """In eight parts, every eighth number to the same, so that a vector can take them."""
    a = b = c = d = e = f = g = h = _F(0)
    whole = row.shape[0] - row.shape[0] % 8
    for j in range(0, whole, 8):
        a += row[j]
        b += row[j + 1]
        c += row[j + 2]
        d += row[j + 3]
        e += row[j + 4]
        f += row[j + 5]
        g += row[j + 6]
        h += row[j + 7]
    for j in range(whole, row.shape[0]):
        a += row[j]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@njit(inline="always", **_FAST)
def _exp(x: np.float32) -> np.float32:
    """Of x <= 0: 2^k e^f with |f| <= log(2) / 2, and e^-87 below that."""
    x = _F(-87) if x < _F(-87) else x  # so that NaN stays NaN
    k = np.floor(x * _F(1.44269504) + _F(0.5))
    f = x - k * _F(0.693359375) + k * _F(2.12194440e-4)  # log 2 in two parts
    p = _F(1.3981999507e-3) + f * _F(1.9875691500e-4)
    p = _F(8.3334519073e-3) + f * p
    p = _F(4.1665795894e-2) + f * p
    p = _F(1.6666665459e-1) + f * p
    p = _F(5.0000001201e-1) + f * p
    return (p * f * f + f + _F(1)) * _as_float((np.int32(k) + np.int32(127)) << np.int32(23))


@njit(inline="always", **_FAST)
def _log1p(x: np.float32) -> np.float32:
    """Of x in [0, 1]: x times the Chebyshev interpolation of log(1 + x) / x of degree 9."""
    p = _F(0.01954253) + x * _F(-0.00317606)
    p = _F(-0.05637361) + x * p
    p = _F(0.10543624) + x * p
    p = _F(-0.15269667) + x * p
    p = _F(0.19663274) + x * p
    p = _F(-0.24951616) + x * p
    p = _F(0.3332971) + x * p
    p = _F(-0.49999893) + x * p
    p = _F(0.99999999) + x * p
    return x * p


def _bitcast(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


_as_float: Any = intrinsic(_bitcast)  # the float32 that has the bits of an int32
