"""Random streams of batches: the shuffle of an epoch, and the numbers that candidates come from.

Both are functions of a position: the i-th value needs no value before it.  The host makes them for
every device, which gets a copy.

Shapes: C chunks, K numbers per chunk.
"""

from __future__ import annotations

import numpy as np

from kge_torchrec.kernels.jit import helper, kernel

_PER_COUNTER = 4  # 64-bit words that Philox gives per counter value
_UNIT = 2.0**-53  # of the upper 53 bits of a word: the number is exact

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


def philox_numbers(
    key: np.ndarray, place: tuple[int, int], chunks: range, count: int
) -> np.ndarray:
    """Return random numbers in [0, 1) by Philox 4x64-10 (Salmon et al. 2011).

    Args:
        key: (2,) uint64, the key of the stream.
        place: Two more words of the counter.
        chunks: Numbers of the C chunks; each starts at a counter of its own.
        count: K.

    Returns:
        (C, K) float64.
    """
    blocks = -(-count // _PER_COUNTER)
    counter = np.array([chunks.start * blocks, *place, 0], np.uint64)
    philox = np.random.Philox(key=key, counter=counter)
    words = philox.random_raw(len(chunks) * blocks * _PER_COUNTER)
    numbers = (words >> np.uint64(11)) * _UNIT
    return numbers.reshape(len(chunks), blocks * _PER_COUNTER)[:, :count]
