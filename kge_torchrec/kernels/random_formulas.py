"""The formulas of `random_streams`: by numba and numpy, and in plain torch, the same to the bit.

torch has no arithmetic with unsigned integers of 64 bits.  Sums and products of signed ones have
the same bits; shifts to the right mask the sign.

Shapes: M positions, C chunks, K numbers per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.jit import helper, kernel

PER_COUNTER = 4  # 64-bit words that Philox gives per counter value
UNIT = 2.0**-53  # of the upper 53 bits of a word: the number is exact
MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's
PHILOX_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
PHILOX_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
PHILOX_ROUNDS = 10

_BLOCK = 1024  # values per block; a block stays in the nearest cache


# Scalars below stay np.uint64 throughout: numba makes a float of uint64 with a signed integer.
@helper
def permute(values: np.ndarray, keys: np.ndarray, half: np.uint64, size: np.uint64) -> None:
    """Replace every value by its image, in place.

    A block of values goes through each round of the network together, in vector lanes; values that
    land outside the range go through again.  One value at a time takes ten times as long: the
    processor waits for every product and mispredicts where each walk ends.
    """
    scratch = np.empty((2, _BLOCK), np.uint64)
    outside = np.empty(_BLOCK, np.int64)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        count = len(block)
        for i in range(count):
            outside[i] = i
        while count:
            _encrypt(block, outside[:count], keys, half, scratch[0], scratch[1])
            kept = 0
            for place in outside[:count]:
                outside[kept] = place
                kept += block[place] >= size
            count = kept


permute_array = kernel(permute.py_func)  # the same, called from Python


@helper
def _encrypt(
    values: np.ndarray,
    places: np.ndarray,
    keys: np.ndarray,
    half: np.uint64,
    left: np.ndarray,
    right: np.ndarray,
) -> None:
    """Apply the Feistel network on 2 * half bits to the values at some places, in place."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    for i in range(len(places)):
        left[i], right[i] = values[places[i]] >> half, values[places[i]] & mask
    for key in keys:
        for i in range(len(places)):
            left[i], right[i] = right[i], left[i] ^ (mix(right[i] + key) & mask)
    for i in range(len(places)):
        values[places[i]] = (left[i] << half) | right[i]


@helper
def mix(value: np.uint64) -> np.uint64:
    """Return the finalizer of SplitMix64 (Steele et al. 2014); wraps around 2^64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def signed(word: int) -> int:
    """Return the signed integer that has the bits of an integer modulo 2^64."""
    word = int(word) & ((1 << 64) - 1)
    return word - (1 << 64) if word >> 63 else word


def _shifted(values: Tensor, count: int) -> Tensor:
    """Shift the bits of int64 values to the right, with zeros from the left."""
    return (values >> count).bitwise_and_((1 << (64 - count)) - 1)


def shuffle_formula(positions: Tensor, keys: Sequence[int], half: int, size: int) -> Tensor:
    """Compute ``shuffled`` in plain torch."""
    images = _encrypted(positions, keys, half)
    while len(outside := (images >= size).nonzero()[:, 0]):
        images[outside] = _encrypted(images[outside], keys, half)
    return images


def _encrypted(values: Tensor, keys: Sequence[int], half: int) -> Tensor:
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix_(right + key) & mask)
    return (left << half) | right


def mix_(words: Tensor) -> Tensor:
    """Replace int64 words by ``mix`` of their bits."""
    for shift, factor in zip((30, 27), MIX, strict=True):
        words.bitwise_xor_(_shifted(words, shift)).mul_(signed(factor))
    return words.bitwise_xor_(_shifted(words, 31))


def numbers_formula(
    key: Sequence[int], counter: Sequence[int], chunks: int, count: int, like: Tensor
) -> Tensor:
    """Compute ``philox_numbers`` in plain torch."""
    blocks = -(-count // PER_COUNTER)
    first = torch.arange(chunks * blocks, device=like.device) + (counter[0] + 1)
    a, b, c, d = (first, *(torch.full_like(first, word) for word in counter[1:]))
    one, two = key
    for _ in range(PHILOX_ROUNDS):
        high, low = _product(a, PHILOX_FACTORS[0])
        other_high, other_low = _product(c, PHILOX_FACTORS[1])
        a, b, c, d = other_high ^ b ^ signed(one), other_low, high ^ d ^ signed(two), low
        one, two = one + PHILOX_STEPS[0], two + PHILOX_STEPS[1]
    words = torch.stack([a, b, c, d], 1).view(chunks, blocks * PER_COUNTER)
    return _shifted(words[:, :count], 11).double() * UNIT


def _product(values: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 64 bits of the unsigned products of values with a factor."""
    mask = (1 << 32) - 1
    low, high = values & mask, _shifted(values, 32)
    factor_low, factor_high = factor & mask, factor >> 32
    cross = high * factor_low
    middle = _shifted(low * factor_low, 32) + (cross & mask) + low * factor_high
    upper = high * factor_high + _shifted(cross, 32) + _shifted(middle, 32)
    return upper, values * signed(factor)


def numpy_numbers(key: np.ndarray, counter: Sequence[int], chunks: int, count: int) -> np.ndarray:
    """Return ``philox_numbers`` as an array; the key is (2,) uint64."""
    blocks = -(-count // PER_COUNTER)
    words = np.random.Philox(
        key=key, counter=np.array(counter, np.int64).view(np.uint64)
    ).random_raw(chunks * blocks * PER_COUNTER)
    unit = (words >> np.uint64(11)) * UNIT
    return unit.reshape(chunks, blocks * PER_COUNTER)[:, :count]
