"""Losses and their gradients by scores, on a CPU, with few passes over the scores.

Operations of torch one after another would move all scores for each of them, and its exponential
and logarithm take their time.  They are polynomials here, since compilers make vectors of those
(Cody and Waite 1980 have the reduction): right to 3e-7.

Against all entities ``normalizers`` reads the scores once and ``gradients`` overwrites them.  Both
are operators of torch; ``operators`` has the same formulas in plain torch.  Scores are of float32,
or of bfloat16, as an array of the 16-bit integers that have its bits; all is
computed in float32 but for what a normalizer adds to exponents, and a gradient rounded as it is
written.  Sampled candidates are few enough for slopes of their own: ``log_sums`` has both in one
pass.

Shapes: Q queries, m entities of a block, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor

from kge_torchrec.kernels.blocks import block_kernel
from kge_torchrec.kernels.jit import FUSED, helper

_LANES = 64  # maxima and sums of a row, each of every 64th score
_LEAST = np.float32(-1e38)  # no score is below it
_F = np.float32  # a number that is not one would make all others double


@torch.library.custom_op("kge_torchrec::normalizers", mutates_args=("out",), device_types="cpu")
def normalizers(scores: Tensor, out: Tensor, softmax: bool) -> None:
    """Write log sum exp s, or sum log(1 + exp s), of scores (Q, m) into ``out`` (Q,) float64."""
    arrays = _array(scores), scores.shape[1], out.numpy(), softmax
    _normalizers(len(scores), scores.numel(), *arrays)


@normalizers.register_fake
def _no_result(scores: Tensor, out: Tensor, softmax: bool) -> None:
    """Return nothing, as the operator itself."""


@torch.library.custom_op("kge_torchrec::gradients", mutates_args=("scores",), device_types="cpu")
def gradients(
    scores: Tensor, normalizer: Tensor, weight: Tensor, rest: float, softmax: bool
) -> None:
    """Overwrite scores (Q, m) by weight (f(s) - rest), with one weight per query, (Q,) float32.

    f(s) is exp(s - normalizer), with a normalizer (Q,) float64, or the sigmoid of s.
    """
    # In two parts: in float32 one of 150 would be off by up to 8e-6, and so would exponentials.
    whole = normalizer.float()
    small = (normalizer - whole).float()
    of_query = (x.contiguous().numpy() for x in (whole, small, weight))
    given = _array(scores), scores.shape[1], *of_query, np.float32(rest), softmax
    _gradients(len(scores), scores.numel(), *given)


@gradients.register_fake
def _nothing(
    scores: Tensor, normalizer: Tensor, weight: Tensor, rest: float, softmax: bool
) -> None:
    """Return nothing, as the operator itself."""


def takes(scores: Tensor) -> bool:
    """Return whether scores are on a CPU, float32 or bfloat16, and contiguous for each query."""
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.bfloat16):
        return False
    rows, step = len(scores), scores.stride(0)
    end = scores.storage_offset() + rows * step
    there = scores.untyped_storage().nbytes() // scores.element_size()
    return scores.stride(1) == 1 and step >= scores.shape[1] and end <= there


def _array(scores: Tensor) -> np.ndarray:
    """Scores with what lies between those of two queries, (Q, m or more); not a copy."""
    whole = scores.as_strided((len(scores), scores.stride(0)), scores.stride())
    return (whole.view(torch.int16) if scores.dtype == torch.bfloat16 else whole).numpy()


def log_sums(scores: Tensor, mask: Tensor | None, softmax: bool) -> Tensor:
    """Return log sum exp s, or sum log(1 + exp s), over the candidates that count; differentiable.

    scores: (..., K) float32 on a CPU, K > 0; mask: (..., K) bool, None where all count.  Returns
    (...); where none counts, -1e38 or 0, with the gradient 0.
    """
    return _log_sums(scores, mask, softmax)[0]


@torch.library.custom_op("kge_torchrec::log_sums", mutates_args=(), device_types="cpu")
def _log_sums(scores: Tensor, mask: Tensor | None, softmax: bool) -> tuple[Tensor, Tensor]:
    """Return the sums (...) and their gradients (..., K), which backward scales."""
    count = scores.shape[-1]
    gradients, sums = torch.empty(scores.shape), torch.empty(scores.shape[:-1])
    every = torch.ones(1, count, dtype=torch.bool) if mask is None else mask
    given = (scores.detach(), every, gradients)
    matrices = (x.contiguous().view(-1, count).numpy() for x in given)
    kernel = _softmax_sums if softmax else _logistic_sums
    kernel(sums.numel(), scores.numel(), *matrices, sums.view(-1).numpy())
    return sums, gradients


@_log_sums.register_fake
def _shapes(scores: Tensor, mask: Tensor | None, softmax: bool) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape[:-1]), scores.new_empty(scores.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
    (gradients,) = ctx.saved_tensors
    return gradients * grad.unsqueeze(-1), None, None


_log_sums.register_autograd(_backward, setup_context=_keep)


# Two kernels, of which a run compiles the one that its loss needs.  A mask of one row is that of
# all queries.


@block_kernel(1, fastmath=FUSED)
def _softmax_sums(
    start: int,
    stop: int,
    scores: np.ndarray,
    mask: np.ndarray,
    slopes: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write log sum exp s of each query, and its gradients."""
    lanes = np.empty(_LANES, np.float32)
    for q in range(start, stop):
        out[q] = _softmax(scores[q], mask[min(q, mask.shape[0] - 1)], slopes[q], lanes)


@block_kernel(1, fastmath=FUSED)
def _logistic_sums(
    start: int,
    stop: int,
    scores: np.ndarray,
    mask: np.ndarray,
    slopes: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write sum log(1 + exp s) of each query, and its gradients."""
    lanes = np.empty(_LANES, np.float32)
    for q in range(start, stop):
        out[q] = _logistic(scores[q], mask[min(q, mask.shape[0] - 1)], slopes[q], lanes)


@helper(fastmath=FUSED)
def _softmax(
    row: np.ndarray, counts: np.ndarray, slope: np.ndarray, lanes: np.ndarray
) -> np.float32:
    for j in range(row.shape[0]):
        slope[j] = row[j] if counts[j] else _LEAST
    top = _largest(slope, lanes)
    for j in range(row.shape[0]):
        slope[j] = _exp(slope[j] - top) if counts[j] else _F(0)
    total = _total(slope, lanes)
    if total == 0:
        return _LEAST
    for j in range(row.shape[0]):
        slope[j] /= total
    return np.log(total) + top


@helper(fastmath=FUSED)
def _logistic(
    row: np.ndarray, counts: np.ndarray, slope: np.ndarray, lanes: np.ndarray
) -> np.float32:
    for j in range(row.shape[0]):
        slope[j] = _exp(-abs(row[j]))  # which both need
    whole = row.shape[0] - row.shape[0] % _LANES
    lanes[:] = _F(0)
    for j in range(0, whole, _LANES):
        for i in range(_LANES):
            value = max(row[j + i], _F(0)) + _log1p(slope[j + i])
            lanes[i] += value if counts[j + i] else _F(0)
    for j in range(whole, row.shape[0]):
        value = max(row[j], _F(0)) + _log1p(slope[j])
        lanes[j - whole] += value if counts[j] else _F(0)
    for j in range(row.shape[0]):
        small = slope[j]
        value = (_F(1) if row[j] >= 0 else small) / (_F(1) + small)
        slope[j] = value if counts[j] else _F(0)
    return _sum_of(lanes)


@block_kernel(1, fastmath=FUSED)
def _normalizers(
    start: int, stop: int, scores: np.ndarray, entities: int, out: np.ndarray, softmax: bool
) -> None:
    lanes = np.empty(_LANES, np.float32)
    for q in range(start, stop):
        row = scores[q, :entities]
        if softmax:
            top = _largest(row, lanes)
            out[q] = np.float64(np.log(_sum(row, top, True, lanes))) + np.float64(top)
        else:
            out[q] = _sum(row, _F(0), False, lanes)


@block_kernel(1, fastmath=FUSED)
def _gradients(
    start: int,
    stop: int,
    scores: np.ndarray,
    entities: int,
    normalizer: np.ndarray,
    small: np.ndarray,
    weight: np.ndarray,
    rest: np.float32,
    softmax: bool,
) -> None:
    for q in range(start, stop):
        row = scores[q, :entities]
        if softmax:
            for j in range(row.shape[0]):
                slope = _exp((_number(row[j]) - normalizer[q]) - small[q])
                _put(row, j, (slope - rest) * weight[q])
        else:
            for j in range(row.shape[0]):
                score = _number(row[j])
                least = _exp(-abs(score))
                slope = (_F(1) if score >= 0 else least) / (_F(1) + least)
                _put(row, j, (slope - rest) * weight[q])


def _number(stored: Any) -> Any:
    """A stored score as float32.  Compiled code alone calls it, by what overloads it below."""
    raise NotImplementedError


@overload(_number, strict=False, jit_options={"fastmath": {"contract"}})
def _number_of(stored: Any) -> Callable[..., Any]:
    if isinstance(stored, types.Float):
        return lambda stored: stored
    return lambda stored: _as_float(np.int32(stored) << np.int32(16))


def _put(row: Any, place: Any, number: Any) -> None:
    """Stores a float32 there; as ``_number``."""
    raise NotImplementedError


@overload(_put, strict=False, jit_options={"fastmath": {"contract"}})
def _put_into(row: Any, place: Any, number: Any) -> Callable[..., None]:
    def whole(row: Any, place: Any, number: Any) -> None:
        row[place] = number

    def rounded(row: Any, place: Any, number: Any) -> None:
        bits = _as_bits(number)
        even = (bits >> np.int32(16)) & np.int32(1)  # where it lies halfway
        up = (bits + np.int32(0x7FFF) + even) >> np.int32(16)
        row[place] = up if number == number else np.int32(0x7FC0)

    return whole if isinstance(row.dtype, types.Float) else rounded


@helper(fastmath=FUSED)
def _sum_of(lanes: np.ndarray) -> np.float32:
    """Half of them onto the other, until one is left: a chain of sums would take longer."""
    half = _LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@helper(fastmath=FUSED)
def _largest_of(lanes: np.ndarray) -> np.float32:
    """As ``_sum_of``."""
    half = _LANES // 2
    while half:
        for i in range(half):
            lanes[i] = max(lanes[i], lanes[i + half])
        half //= 2
    return lanes[0]


@helper(fastmath=FUSED)
def _largest(row: np.ndarray, lanes: np.ndarray) -> np.float32:
    """Of a row; lane by lane, so that compilers make vectors of it.  Overwrites lanes."""
    whole = row.shape[0] - row.shape[0] % _LANES
    lanes[:] = _F(-np.inf)
    for j in range(0, whole, _LANES):
        for i in range(_LANES):
            lanes[i] = max(lanes[i], _number(row[j + i]))
    for j in range(whole, row.shape[0]):
        lanes[0] = max(lanes[0], _number(row[j]))
    return _largest_of(lanes)


@helper(fastmath=FUSED)
def _total(row: np.ndarray, lanes: np.ndarray) -> np.float32:
    """Of a row; as ``_largest``."""
    whole = row.shape[0] - row.shape[0] % _LANES
    lanes[:] = _F(0)
    for j in range(0, whole, _LANES):
        for i in range(_LANES):
            lanes[i] += row[j + i]
    for j in range(whole, row.shape[0]):
        lanes[j - whole] += row[j]
    return _sum_of(lanes)


@helper(fastmath=FUSED)
def _sum(row: np.ndarray, top: np.float32, softmax: bool, lanes: np.ndarray) -> np.float32:
    """Of exp(s - top), or of log(1 + exp s); as ``_largest``."""
    whole = row.shape[0] - row.shape[0] % _LANES
    lanes[:] = _F(0)
    for j in range(0, whole, _LANES):
        if softmax:
            for i in range(_LANES):
                lanes[i] += _exp(_number(row[j + i]) - top)
        else:
            for i in range(_LANES):
                lanes[i] += _softplus(_number(row[j + i]))
    for j in range(whole, row.shape[0]):
        score = _number(row[j])
        lanes[0] += _exp(score - top) if softmax else _softplus(score)
    return _sum_of(lanes)


@helper(fastmath=FUSED)
def _softplus(score: np.float32) -> np.float32:
    return max(score, _F(0)) + _log1p(_exp(-abs(score)))


@helper(fastmath=FUSED)
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


@helper(fastmath=FUSED)
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


def _bitcast(result: Any, given: Any, llvm: Any) -> Any:
    def typed(typing_context: Any, bits: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], llvm)

        return result(given), generate

    return intrinsic(typed)


_as_float: Any = _bitcast(types.float32, types.int32, ir.FloatType())  # of the same bits
_as_bits: Any = _bitcast(types.int32, types.float32, ir.IntType(32))
