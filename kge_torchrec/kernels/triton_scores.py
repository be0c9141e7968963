"""Kernels over scores on CUDA, written in Triton: losses, their gradients, and counts for ranks.

They have the interface of ``scores``, the kernels for the CPU, and compute in float32, except for
the exponent of a normalizer, which is float64.

Brings: a chain of torch operators reads and writes all scores once per operator, about six times;
these kernels read them once, and write gradients once.

Shapes: Q queries, m entities of a block, M values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kge_torchrec.kernels.library import operator

_TILE = 1024  # scores that a program reads at a time
_PASSES = 16  # tiles that a program counts
_LEAST = -1e38  # below every score; -inf - (-inf) would be nan


def _write_normalizers(scores: Tensor, out: Tensor, softmax: bool) -> None:
    """Write log sum exp s, or sum log(1 + exp s), of scores (Q, m) into ``out`` (Q,) float64."""
    _normalizers[(len(scores),)](
        scores, out, scores.stride(0), scores.shape[1], softmax, _LEAST, _TILE
    )


normalizers = operator("triton_normalizers", _write_normalizers, lambda *_: None, mutates=("out",))


def _write_gradients(
    scores: Tensor, normalizer: Tensor, weight: Tensor, rest: Tensor, softmax: bool
) -> None:
    """Overwrite scores (Q, m) by the gradients of ``scores``, the kernels for the CPU."""
    per_query = (x.contiguous() for x in (normalizer, weight, rest))
    tiles = len(scores) * triton.cdiv(scores.shape[1], _TILE)
    _gradients[(tiles,)](scores, *per_query, scores.stride(0), scores.shape[1], softmax, _TILE)


gradients = operator("triton_gradients", _write_gradients, lambda *_: None, mutates=("scores",))


@triton.jit
def _normalizers(
    scores: tl.tensor,
    out: tl.tensor,
    step: tl.tensor,
    width: tl.tensor,
    SOFTMAX: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Compute the normalizer of one query; each of TILE lanes has a maximum and a sum."""
    query = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    top, total = tl.full((TILE,), LEAST, tl.float32), tl.zeros((TILE,), tl.float32)
    for start in range(0, width, TILE):
        column = start + lanes
        score = tl.load(scores + query * step + column, column < width, float("-inf"))
        score = score.to(tl.float32)
        if SOFTMAX:
            higher = tl.maximum(top, score)
            total = total * tl.exp(top - higher) + tl.exp(score - higher)
            top = higher
        else:
            total += tl.maximum(score, 0.0) + _log_of_one_more(tl.exp(-tl.abs(score)))
    if SOFTMAX:
        highest = tl.max(top, 0)
        sums = tl.log(tl.sum(total * tl.exp(top - highest), 0))
        tl.store(out + query, highest.to(tl.float64) + sums.to(tl.float64))
    else:
        tl.store(out + query, tl.sum(total, 0).to(tl.float64))


@triton.jit
def _log_of_one_more(x: tl.tensor) -> tl.tensor:
    """Return log(1 + x) of x in [0, 1], as 2 artanh(x / (2 + x)).

    The sum 1 + x loses the digits of a small x, and a GPU's logarithm has few near 1.
    """
    z = x / (2 + x)
    y = z * z
    series = 1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11 + y * (1 / 13 + y / 15)))))
    return 2 * z * (1 + y * series)


@triton.jit
def _gradients(
    scores: tl.tensor,
    normalizer: tl.tensor,
    weight: tl.tensor,
    rest: tl.tensor,
    step: tl.tensor,
    width: tl.tensor,
    SOFTMAX: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Overwrite a tile of one query's scores."""
    query, column = _place(tl.program_id(0), width, TILE)
    place, inside = scores + query * step + column, column < width
    score = tl.load(place, inside, 0).to(tl.float32)
    if SOFTMAX:
        exponent = score.to(tl.float64) - tl.load(normalizer + query)
        value = tl.exp(exponent.to(tl.float32))
    else:
        value = tl.sigmoid(score)
    value = (value - tl.load(rest + query).to(tl.float32)) * tl.load(weight + query)
    tl.store(place, value.to(scores.dtype.element_ty), inside)


@triton.jit
def _place(program: tl.tensor, width: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the query of a tile, and its columns, in int64."""
    tile, tiles = program.to(tl.int64), tl.cdiv(width, TILE)
    return tile // tiles, tile % tiles * TILE + tl.arange(0, TILE)


def _add_counts(
    scores: Tensor, values: Tensor, query: Tensor | None, less: Tensor, equal: Tensor
) -> None:
    """Add to less and equal (M,) the counts of ``operators.count_block``."""
    width = scores.shape[1]
    parts = triton.cdiv(width, _TILE * _PASSES)
    if len(values) * parts:
        rows = values if query is None else query
        _counts[(len(values) * parts,)](
            scores, values, rows, less, equal, width, query is not None, _TILE, _PASSES
        )


counts = operator("triton_counts", _add_counts, lambda *_: None, mutates=("less", "equal"))


@triton.jit(do_not_specialize=["width"])
def _counts(
    scores: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,
    less: tl.tensor,
    equal: tl.tensor,
    width: tl.tensor,
    HAS_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PASSES: tl.constexpr,
) -> None:
    """Count a part of a query's scores; sums of integers do not depend on their order."""
    program, parts = tl.program_id(0).to(tl.int64), tl.cdiv(width, WIDTH * PASSES)
    value_of, first = program // parts, program % parts * WIDTH * PASSES
    row = tl.load(rows + value_of) if HAS_ROWS else value_of
    value, lanes = tl.load(values + value_of), tl.arange(0, WIDTH)
    below, same = tl.zeros((WIDTH,), tl.int32), tl.zeros((WIDTH,), tl.int32)
    for i in range(PASSES):
        column = first + i * WIDTH + lanes
        # A NaN is neither below nor equal.
        score = tl.load(scores + row * width + column, column < width, float("nan"))
        below += (score < value).to(tl.int32)
        same += (score == value).to(tl.int32)
    tl.atomic_add(less + value_of, tl.sum(below, 0).to(tl.int64))
    tl.atomic_add(equal + value_of, tl.sum(same, 0).to(tl.int64))
