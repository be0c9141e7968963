"""Epoch order: a keyed pseudo-random permutation computed position by position.

Every rank computes just its own share, in memory of the batch's size; a stored permutation of 1.4
billion triples would take 10 GiB a rank.  The permutation is a Feistel network (Luby and Rackoff
1988) on the next even power of two, walked until it lands inside the range (Black and Rogaway
2002).  The order is a function of (seed, epoch, position) only, never of the world size.
"""

from __future__ import annotations

import numba
import numpy as np

ROUNDS = 6


class EpochShuffle:
    """A bijection of [0, size) onto itself, different for every (seed, epoch)."""

    def __init__(self, size: int, seed: int, epoch: int):
        if size < 1:
            raise ValueError(f"an epoch needs at least one triple, got {size}")
        self.size = size
        self._half = max(1, (int(size - 1).bit_length() + 1) // 2)
        # The spawn key is mixed in apart from the seed, so (0, 1) and (1, 0) share nothing.
        keys = np.random.SeedSequence(seed, spawn_key=(epoch,))
        self._keys = keys.generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """(M,) positions in the epoch -> (M,) int64 indices of triples."""
        out = positions.astype(np.uint64)
        _permute(out, self._keys, np.uint64(self._half), np.uint64(self.size))
        return out.view(np.int64)


class ReplayShuffle:
    """The order of an epoch over new examples and a share of the old ones, drawn anew every epoch.

    old: examples [0, old) of [0, size) are old ones; share: of those, in [0, 1], 0 for none.
    """

    def __init__(self, size: int, old: int, share: float, seed: int, epoch: int):
        self._new, self._old = size - old, old
        self.size = replayed_size(size, old, share)
        self._order = EpochShuffle(self.size, seed, epoch)
        self._drawn = EpochShuffle(old, seed + 1, epoch) if self.size > self._new else None

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """(M,) positions in the epoch -> (M,) int64 indices of examples, each at most once."""
        places = self._order(positions)
        index = places + self._old  # of new ones
        if self._drawn is not None:
            is_old = places >= self._new
            index[is_old] = self._drawn(places[is_old] - self._new)
        return index


def replayed_size(size: int, old: int, share: float) -> int:
    """Examples of an epoch over all new ones and a share of the old ones."""
    return size - old + round(old * share)


def draw_distinct(
    sizes: np.ndarray, count: int, numbers: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """``count`` different positions in [0, sizes[i]) for every i; all of them where no more are.

    sizes, numbers: (Q,) int64; those drawn for i are a function of its size and number and of the
    keys (ROUNDS,) uint64: the first of the permutation that these make.  Returns the positions for
    all i, one after another, int64.
    """
    out = np.empty(np.minimum(sizes, count).sum(), np.int64)
    _draw_distinct(sizes, count, numbers.view(np.uint64), keys, out)
    return out


@numba.njit(cache=True, nogil=True)
def _draw_distinct(
    sizes: np.ndarray, count: int, numbers: np.ndarray, keys: np.ndarray, out: np.ndarray
) -> None:
    own = np.empty_like(keys)
    start = 0
    for i in range(len(sizes)):
        drawn = out[start : start + min(sizes[i], count)]
        for position in range(len(drawn)):
            drawn[position] = position
        if sizes[i] > count:
            for turn in range(len(keys)):
                own[turn] = _mix(keys[turn] ^ _mix(numbers[i] + np.uint64(turn)))
            half = np.uint64(1)
            while np.uint64(1) << (half + half) < np.uint64(sizes[i]):
                half += np.uint64(1)
            _permute(drawn.view(np.uint64), own, half, np.uint64(sizes[i]))
        start += len(drawn)


_BLOCK = 1024  # values that are walked at once: they stay in the nearest cache


# Scalars below stay np.uint64 throughout: numba makes a float of uint64 with a signed integer.
@numba.njit(cache=True, nogil=True)
def _permute(values: np.ndarray, keys: np.ndarray, half: np.uint64, size: np.uint64) -> None:
    """Replaces every value by its image, in place.

    A block of values goes through each round of the network together, in vector lanes; those that
    land outside the range go through once more.  One value after another, a processor waits for
    every product, and guesses wrong where each walk ends: ten times as long.
    """
    scratch = np.empty((2, _BLOCK), np.uint64)
    outside = np.empty(_BLOCK, np.int64)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        count = len(block)
        outside[:count] = np.arange(count)
        while count:
            _encrypt(block, outside[:count], keys, half, scratch[0], scratch[1])
            kept = 0
            for place in outside[:count]:
                outside[kept] = place
                kept += block[place] >= size
            count = kept


@numba.njit(cache=True, nogil=True)
def _encrypt(
    values: np.ndarray,
    places: np.ndarray,
    keys: np.ndarray,
    half: np.uint64,
    left: np.ndarray,
    right: np.ndarray,
) -> None:
    """The Feistel network on 2 * half bits of the values at some places, in place."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    for i in range(len(places)):
        left[i], right[i] = values[places[i]] >> half, values[places[i]] & mask
    for key in keys:
        for i in range(len(places)):
            left[i], right[i] = right[i], left[i] ^ (_mix(right[i] + key) & mask)
    for i in range(len(places)):
        values[places[i]] = (left[i] << half) | right[i]


@numba.njit(cache=True, nogil=True)
def _mix(value: np.uint64) -> np.uint64:
    """The finalizer of SplitMix64 (Steele et al. 2014); wraps around 2^64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
