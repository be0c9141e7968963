"""The operators of `random_streams` on CUDA, by one Triton kernel each.

Words of 64 bits arrive as signed integers; the kernels read them as unsigned ones.

Shapes: M positions, C chunks, K numbers per chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kge_torchrec.kernels.random_formulas import (
    MIX,
    PER_COUNTER,
    PHILOX_FACTORS,
    PHILOX_ROUNDS,
    PHILOX_STEPS,
    UNIT,
)

_LANES = 512  # positions, or values of the counter, per program
_MIX_1, _MIX_2 = map(tl.constexpr, MIX)
_FACTOR_1, _FACTOR_2 = map(tl.constexpr, PHILOX_FACTORS)
_STEP_1, _STEP_2 = map(tl.constexpr, PHILOX_STEPS)
_ROUNDS, _PER_COUNTER, _UNIT = map(tl.constexpr, (PHILOX_ROUNDS, PER_COUNTER, UNIT))


def shuffled(positions: Tensor, keys: list[int], half: int, size: int) -> Tensor:
    """Return the images (M,) int64 of positions (M,); see ``random_streams.shuffled``."""
    positions = positions.contiguous()
    images = torch.empty_like(positions)
    if count := positions.numel():
        grid = (triton.cdiv(count, _LANES),)
        _shuffle[grid](positions, images, count, half, size, *keys, LANES=_LANES)
    return images


def numbers(key: list[int], counter: list[int], chunks: int, count: int, like: Tensor) -> Tensor:
    """Return random numbers (C, K) float64; see ``random_streams.philox_numbers``."""
    out = like.new_empty(chunks, count, dtype=torch.float64)
    blocks = triton.cdiv(count, PER_COUNTER)
    if chunks * blocks:
        grid = (triton.cdiv(chunks * blocks, _LANES),)
        _fill[grid](out, chunks * blocks, blocks, count, *key, *counter, LANES=_LANES)
    return out


@triton.jit
def _turned(left, right, key, mask):
    """One round of the Feistel network, whose function is SplitMix64's finalizer."""
    word = right + key.to(tl.uint64)
    word = (word ^ (word >> 30)) * _MIX_1
    word = (word ^ (word >> 27)) * _MIX_2
    return right, left ^ ((word ^ (word >> 31)) & mask)


@triton.jit
def _encrypted(values, half, mask, k0, k1, k2, k3, k4, k5):
    left, right = values >> half, values & mask
    left, right = _turned(left, right, k0, mask)
    left, right = _turned(left, right, k1, mask)
    left, right = _turned(left, right, k2, mask)
    left, right = _turned(left, right, k3, mask)
    left, right = _turned(left, right, k4, mask)
    left, right = _turned(left, right, k5, mask)
    return (left << half) | right


@triton.jit(do_not_specialize=["count", "half", "size"])  # a constant 1 has no dtype
def _shuffle(positions, images, count, half, size, k0, k1, k2, k3, k4, k5, LANES: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    valid = place < count
    half = half.to(tl.uint64)
    mask = (tl.full((), 1, tl.uint64) << half) - 1
    value = tl.load(positions + place, mask=valid, other=0).to(tl.uint64)
    value = _encrypted(value, half, mask, k0, k1, k2, k3, k4, k5)
    outside = valid & (value >= size.to(tl.uint64))
    while tl.max(outside.to(tl.int32), 0) > 0:  # as in the network on a CPU, until all are inside
        again = _encrypted(value, half, mask, k0, k1, k2, k3, k4, k5)
        value = tl.where(outside, again, value)
        outside = valid & (value >= size.to(tl.uint64))
    tl.store(images + place, value.to(tl.int64), mask=valid)


@triton.jit(do_not_specialize=["total", "blocks", "count", "first", "step", "side", "last"])
def _fill(out, total, blocks, count, key_1, key_2, first, step, side, last, LANES: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    zero = tl.zeros((LANES,), tl.uint64)
    a = (block + first + 1).to(tl.uint64)
    b, c, d = zero + step.to(tl.uint64), zero + side.to(tl.uint64), zero + last.to(tl.uint64)
    one, two = key_1.to(tl.uint64), key_2.to(tl.uint64)
    for _ in tl.static_range(_ROUNDS):
        high, low = tl.umulhi(a, zero + _FACTOR_1), a * _FACTOR_1
        other_high, other_low = tl.umulhi(c, zero + _FACTOR_2), c * _FACTOR_2
        a, b, c, d = other_high ^ b ^ one, other_low, high ^ d ^ two, low
        one, two = one + _STEP_1, two + _STEP_2
    chunk, column = block // blocks, block % blocks * _PER_COUNTER
    start = out + chunk * count + column
    valid = block < total
    tl.store(start, (a >> 11).to(tl.float64) * _UNIT, mask=valid & (column < count))
    tl.store(start + 1, (b >> 11).to(tl.float64) * _UNIT, mask=valid & (column + 1 < count))
    tl.store(start + 2, (c >> 11).to(tl.float64) * _UNIT, mask=valid & (column + 2 < count))
    tl.store(start + 3, (d >> 11).to(tl.float64) * _UNIT, mask=valid & (column + 3 < count))
