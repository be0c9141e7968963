"""Compiled look-ups in the filter index."""

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def lower_bound(values, value, low, high):
    """First position in the ascending ``values[low:high]`` that is not below ``value``."""
    while low < high:
        middle = (low + high) // 2
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True)
def find_ranges(indptr, row_relations, anchors, relations):
    """Where the answers of each query (anchor, relation) lie: starts (B,), stops (B,)."""
    starts = np.empty(len(anchors), np.int64)
    stops = np.empty(len(anchors), np.int64)
    for query in range(len(anchors)):
        low, high = indptr[anchors[query]], indptr[anchors[query] + 1]
        starts[query] = lower_bound(row_relations, relations[query], low, high)
        stops[query] = lower_bound(row_relations, relations[query] + 1, starts[query], high)
    return starts, stops


@numba.njit(cache=True, nogil=True)
def narrow(ids, starts, stops, first, last):
    """The parts of ascending ranges of ``ids`` whose ids lie in [first, last): starts, stops."""
    lows = np.empty(len(starts), np.int64)
    highs = np.empty(len(starts), np.int64)
    for query in range(len(starts)):
        lows[query] = lower_bound(ids, first, starts[query], stops[query])
        highs[query] = lower_bound(ids, last, lows[query], stops[query])
    return lows, highs


@numba.njit(cache=True, nogil=True)
def mark_members(entities, starts, stops, candidates, found):
    """Sets ``found[b, k]`` where ``candidates[b, k]`` is in the ascending range of query b."""
    for query in range(len(starts)):
        low, high = starts[query], stops[query]
        if low == high:
            continue
        first, last = entities[low], entities[high - 1]
        for column in range(candidates.shape[1]):
            candidate = candidates[query, column]
            if candidate < first or candidate > last:
                continue
            # Steps that depend on the range's length only, not on the data, cost no mispredictions.
            position, size = low, high - low
            while size > 1:
                half = size // 2
                position += half * (entities[position + half] <= candidate)
                size -= half
            if entities[position] == candidate:
                found[query, column] = True
