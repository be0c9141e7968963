"""Loss kernels for CUDA: normalizers of scores of all entities and gradients, written in Triton.

They have the interface of ``score_gradients``, the kernels for the CPU. A chain of torch operators
reads and writes all scores once per operator; these kernels read them once, and write gradients
once. They compute in float32, except for the exponent of a normalizer, which is float64.

Shapes: Q queries, m entities of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # scores that a program reads at a time
_LEAST = -1e38  # below every score; -inf - (-inf) would be nan


@torch.library.custom_op("kge_torchrec::triton_normalizers", mutates_args=("out",))
def normalizers(scores: Tensor, out: Tensor, softmax: bool) -> None:
    """Write log sum exp s, or sum log(1 + exp s), of scores (Q, m) into ``out`` (Q,) float64."""
    _normalizers[(len(scores),)](
        scores, out, scores.stride(0), scores.shape[1], softmax, _LEAST, _TILE
    )


@torch.library.custom_op("kge_torchrec::triton_gradients", mutates_args=("scores",))
def gradients(
    scores: Tensor, normalizer: Tensor, weight: Tensor, rest: Tensor | None, softmax: bool
) -> None:
    """Overwrite scores (Q, m) by weight (f(s) - rest), with one weight and rest per query, (Q,).

    f(s) is exp(s - normalizer), with a normalizer (Q,) float64, or the sigmoid of s.
    """
    rest = torch.zeros_like(normalizer) if rest is None else rest
    per_query = (x.contiguous() for x in (normalizer, weight, rest))
    tiles = len(scores) * triton.cdiv(scores.shape[1], _TILE)
    _gradients[(tiles,)](scores, *per_query, scores.stride(0), scores.shape[1], softmax, _TILE)


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
