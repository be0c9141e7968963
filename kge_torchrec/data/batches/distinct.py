"""The distinct ids of a batch, which the lookup is asked for, and which of them each place is.

What ``torch.unique`` and ``np.unique`` find, but by a radix sort: ids are whole numbers below the
number of entities, so that two to four passes over a batch sort it, where those sorts compare.

Shapes: M ids, U distinct ones.
"""

from __future__ import annotations

import numba
import numpy as np

_BITS = 8  # of an id that a pass sorts by; their counts stay in the nearest cache
_VALUES = 1 << _BITS


@numba.njit(cache=True, nogil=True)
def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids (U,), ascending, and the place among them of each id (M,), int64 both.

    ids: (M,) int64, none below 0, which is not checked; M may be 0.
    """
    places = _sorted_places(ids)
    unique, inverse = np.empty_like(ids), np.empty_like(ids)
    count, last = 0, np.int64(-1)
    for place in places:
        count += ids[place] != last  # without a branch, which nobody could foresee
        last = ids[place]
        unique[count - 1] = last
        inverse[place] = count - 1
    return unique[:count].copy(), inverse


@numba.njit(cache=True, nogil=True)
def _sorted_places(ids: np.ndarray) -> np.ndarray:
    """(M,) the places of the ids in ascending order, equal ones as they came."""
    largest = np.int64(0)
    for number in ids:
        largest = max(largest, number)
    places, other = np.arange(len(ids)), np.empty(len(ids), np.int64)
    shift = 0
    while shift < 64 and largest >> shift:
        starts = np.zeros(_VALUES + 1, np.int64)
        for number in ids:
            starts[((number >> shift) & (_VALUES - 1)) + 1] += 1
        for value in range(_VALUES):
            starts[value + 1] += starts[value]
        for place in places:
            value = (ids[place] >> shift) & (_VALUES - 1)
            other[starts[value]] = place
            starts[value] += 1
        places, other = other, places
        shift += _BITS
    return places
