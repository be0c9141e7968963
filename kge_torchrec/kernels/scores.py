"""Kernels over scores on a CPU: losses, their gradients, and counts for ranks.

Brings: a chain of torch operators reads and writes all scores once per operator, these kernels need
one or two passes. In plain torch a step takes 1.03 to 1.19 times as long with sampled candidates,
1.67 times with all entities; counts of 512 x 14,541 scores take 80 instead of 1.7 ms of one thread.

For scores of all entities, ``normalizers`` reads the scores once and ``gradients`` overwrites them.
Scores are float32 or bfloat16, which the kernels see as 16-bit integers; they compute in float32,
except for the normalizer of an exponent, which is float64. exp and log are polynomials, which
compilers vectorize (range reduction of Cody and Waite 1980), with an error below 3e-7.

Shapes: Q queries, m entities of a block, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from kge_torchrec.kernels.ids import check_within
from kge_torchrec.kernels.jit import FUSED, helper, kernel
from kge_torchrec.kernels.library import arrays, operator
from kge_torchrec.kernels.parallel import BlockKernel, block_kernel

_LANES = 64  # partial maxima or sums of a row; lane i takes every 64th score
_LEAST = np.float32(-1e38)  # stands for the score of a masked candidate
_F = np.float32  # a Python float would turn the computation into double


def _write_normalizers(scores: Tensor, out: Tensor, softmax: bool) -> None:
    """Write log sum exp s, or sum log(1 + exp s), of scores (Q, m) into ``out`` (Q,) float64."""
    _normalizers(len(scores), scores.numel(), _array(scores), scores.shape[1], out.numpy(), softmax)


normalizers = operator("normalizers", _write_normalizers, lambda *_: None, mutates=("out",))


def _write_gradients(
    scores: Tensor, normalizer: Tensor, weight: Tensor, rest: Tensor, softmax: bool
) -> None:
    """Overwrite scores (Q, m) by weight (f(s) - rest), with one weight and rest per query, (Q,).

    f(s) is exp(s - normalizer), with a normalizer (Q,) float64, or the sigmoid of s.
    """
    # Two float32 parts: a single one has an error of up to 8e-6 at 150, and so do exponentials.
    whole = normalizer.float()
    small = (normalizer - whole).float()
    per_query = (x.contiguous().numpy() for x in (whole, small, weight, rest.float()))
    args = _array(scores), scores.shape[1], *per_query, softmax
    _gradients(len(scores), scores.numel(), *args)


gradients = operator("gradients", _write_gradients, lambda *_: None, mutates=("scores",))


def _array(scores: Tensor) -> np.ndarray:
    """View scores as an array (Q, stride), with the gap after each query's scores."""
    whole = scores.as_strided((len(scores), scores.stride(0)), scores.stride())
    return (whole.view(torch.int16) if scores.dtype == torch.bfloat16 else whole).numpy()


class LogSums(torch.autograd.Function):
    """log sum exp s, or sum log(1 + exp s), over the candidates that count.

    ``LogSums.apply(scores, mask, softmax)`` takes scores (..., K) float32 with K > 0; a mask
    (..., K) bool; and which of the two sums to take. It returns the sums (...); where no candidate
    counts, -1e38 or 0, with the gradient 0.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, softmax: bool) -> Tensor:
        gradients, sums = scores.new_empty(scores.shape), scores.new_empty(scores.shape[:-1])
        inputs = scores, mask, gradients
        matrices = [x.contiguous().view(-1, scores.shape[-1]) for x in inputs]
        if not scores.is_meta:  # where a plan counts memory
            arrays = [x.numpy() for x in (*matrices, sums.view(-1))]
            _sums_kernel(softmax)(sums.numel(), scores.numel(), *arrays)
        ctx.save_for_backward(gradients)  # backward scales them
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients.mul_(grad.unsqueeze(-1)), None, None


@cache
def _sums_kernel(softmax: bool) -> BlockKernel:
    """Return the kernel of one loss, so that a run compiles no other."""
    sum_of = _softmax if softmax else _logistic

    @block_kernel(1, name="softmax_sums" if softmax else "logistic_sums", fastmath=FUSED)
    def write_sums(
        start: int,
        stop: int,
        scores: np.ndarray,
        mask: np.ndarray,
        gradients: np.ndarray,
        out: np.ndarray,
    ) -> None:
        lanes = np.empty(_LANES, np.float32)
        for q in range(start, stop):
            out[q] = sum_of(scores[q], mask[q], gradients[q], lanes)

    return write_sums


@helper(fastmath=FUSED)
def _softmax(
    row: np.ndarray, counts: np.ndarray, gradient: np.ndarray, lanes: np.ndarray
) -> np.float32:
    for j in range(row.shape[0]):
        gradient[j] = row[j] if counts[j] else _LEAST
    top = _largest(lanes, row.shape[0], gradient)
    for j in range(row.shape[0]):
        gradient[j] = _exp(gradient[j] - top) if counts[j] else _F(0)
    total = _sum(lanes, row.shape[0], gradient)
    if total == 0:
        return _LEAST
    for j in range(row.shape[0]):
        gradient[j] /= total
    return np.log(total) + top


@helper(fastmath=FUSED)
def _logistic(
    row: np.ndarray, counts: np.ndarray, gradient: np.ndarray, lanes: np.ndarray
) -> np.float32:
    for j in range(row.shape[0]):
        gradient[j] = _exp(-abs(row[j]))  # both the loss and the gradient need it
    total = _sum_of_masked_softplus(lanes, row.shape[0], row, counts, gradient)
    for j in range(row.shape[0]):
        gradient[j] = _sigmoid(row[j], gradient[j]) if counts[j] else _F(0)
    return total


@block_kernel(1, fastmath=FUSED)
def _normalizers(
    start: int, stop: int, scores: np.ndarray, entities: int, out: np.ndarray, softmax: bool
) -> None:
    lanes = np.empty(_LANES, np.float32)
    for q in range(start, stop):
        row = scores[q, :entities]
        if softmax:
            top = _largest(lanes, entities, row)
            out[q] = np.float64(np.log(_sum_of_exp(lanes, entities, row, top))) + np.float64(top)
        else:
            out[q] = _sum_of_softplus(lanes, entities, row)


@block_kernel(1, fastmath=FUSED)
def _gradients(
    start: int,
    stop: int,
    scores: np.ndarray,
    entities: int,
    normalizer: np.ndarray,
    small: np.ndarray,
    weight: np.ndarray,
    rest: np.ndarray,
    softmax: bool,
) -> None:
    for q in range(start, stop):
        row = scores[q, :entities]
        if softmax:
            for j in range(row.shape[0]):
                gradient = _exp((_number(row[j]) - normalizer[q]) - small[q])
                _put(row, j, (gradient - rest[q]) * weight[q])
        else:
            for j in range(row.shape[0]):
                score = _number(row[j])
                gradient = _sigmoid(score, _exp(-abs(score)))
                _put(row, j, (gradient - rest[q]) * weight[q])


def _number(stored: Any) -> Any:
    """Return a stored score as float32.  Only compiled code calls it, see ``_number_of``."""
    raise NotImplementedError


@overload(_number, strict=False, jit_options={"fastmath": {"contract"}})
def _number_of(stored: Any) -> Callable[..., Any]:
    if isinstance(stored, types.Float):
        return lambda stored: stored
    return lambda stored: np.int32(np.int32(stored) << np.int32(16)).view(_F)


def _put(row: Any, place: Any, number: Any) -> None:
    """Store a float32 number.  Only compiled code calls it, see ``_put_into``."""
    raise NotImplementedError


@overload(_put, strict=False, jit_options={"fastmath": {"contract"}})
def _put_into(row: Any, place: Any, number: Any) -> Callable[..., None]:
    def whole(row: Any, place: Any, number: Any) -> None:
        row[place] = number

    def rounded(row: Any, place: Any, number: Any) -> None:
        bits = _F(number).view(np.int32)
        even = (bits >> np.int32(16)) & np.int32(1)  # for ties: round half to even
        up = (bits + np.int32(0x7FFF) + even) >> np.int32(16)
        row[place] = up if number == number else np.int32(0x7FC0)

    return whole if isinstance(row.dtype, types.Float) else rounded


def _over_row(term: Any, join: Any, first: float) -> Any:
    """Return the helper (lanes, size, *args) that joins ``term(j, *args)`` over j < size.

    It works in lanes that compilers vectorize, and joins lanes by halves at the end.
    """
    term, join = helper(term, fastmath=FUSED), helper(join, fastmath=FUSED)
    start = _F(first)

    def joined(lanes: np.ndarray, size: int, *args: Any) -> np.float32:
        whole, half = size - size % _LANES, _LANES // 2
        lanes[:] = start
        for j in range(0, whole, _LANES):
            for i in range(_LANES):
                lanes[i] = join(lanes[i], term(j + i, *args))
        for j in range(whole, size):
            lanes[j - whole] = join(lanes[j - whole], term(j, *args))
        while half:
            for i in range(half):
                lanes[i] = join(lanes[i], lanes[i + half])
            half //= 2
        return lanes[0]

    return helper(joined, fastmath=FUSED)


def _masked_softplus(j: int, row: np.ndarray, counts: np.ndarray, small: np.ndarray) -> np.float32:
    return max(row[j], _F(0)) + _log1p(small[j]) if counts[j] else _F(0)


@helper(fastmath=FUSED)
def _softplus(score: np.float32) -> np.float32:
    return max(score, _F(0)) + _log1p(_exp(-abs(score)))


@helper(fastmath=FUSED)
def _sigmoid(score: np.float32, small: np.float32) -> np.float32:
    """Return the sigmoid of a score from exp(-|score|)."""
    return (_F(1) if score >= 0 else small) / (_F(1) + small)


@helper(fastmath=FUSED)
def _exp(x: np.float32) -> np.float32:
    """Return e^x = 2^k e^f for x <= 0, with |f| <= log(2) / 2; e^-87 for x < -87."""
    x = _F(-87) if x < _F(-87) else x  # not max(), so that NaN stays NaN
    k = np.floor(x * _F(1.44269504) + _F(0.5))
    f = x - k * _F(0.693359375) + k * _F(2.12194440e-4)  # log 2 in two parts
    p = _F(1.3981999507e-3) + f * _F(1.9875691500e-4)
    p = _F(8.3334519073e-3) + f * p
    p = _F(4.1665795894e-2) + f * p
    p = _F(1.6666665459e-1) + f * p
    p = _F(5.0000001201e-1) + f * p
    power = (np.int32(k) + np.int32(127)) << np.int32(23)  # 2^k, as the bits of an exponent
    return (p * f * f + f + _F(1)) * np.int32(power).view(_F)


@helper(fastmath=FUSED)
def _log1p(x: np.float32) -> np.float32:
    """Return log(1 + x) for x in [0, 1], by Chebyshev interpolation of log(1 + x) / x, degree 9."""
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


_largest = _over_row(lambda j, row: _number(row[j]), lambda a, b: max(a, b), -np.inf)
_sum = _over_row(lambda j, row: row[j], lambda a, b: a + b, 0)
_sum_of_exp = _over_row(lambda j, row, top: _exp(_number(row[j]) - top), lambda a, b: a + b, 0)
_sum_of_softplus = _over_row(lambda j, row: _softplus(_number(row[j])), lambda a, b: a + b, 0)
_sum_of_masked_softplus = _over_row(_masked_softplus, lambda a, b: a + b, 0)


def counts(
    scores: Tensor, values: Tensor, query: Tensor | None, less: Tensor, equal: Tensor
) -> None:
    """Add to less and equal (M,) the counts of ``operators.count_block``."""
    query = torch.arange(len(values)) if query is None else query
    check_within("queries", query, len(scores))
    _count(*arrays(scores, query, values, less, equal))


# Single-threaded on purpose: this pass over cached scores takes a few percent of the time of the
# matrix product. A second thread pool next to torch's would slow both down.
@kernel
def _count(
    scores: np.ndarray, query: np.ndarray, values: np.ndarray, less: np.ndarray, equal: np.ndarray
) -> None:
    for i in range(len(query)):
        row, threshold = scores[query[i]], values[i]
        below = 0
        same = 0
        for j in range(scores.shape[1]):
            below += row[j] < threshold
            same += row[j] == threshold
        less[i] += below
        equal[i] += same
