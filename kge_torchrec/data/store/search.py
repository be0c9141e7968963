"""Compiled walks over the filter index: look-ups, and the distinct queries without a list of them.

In the filter index all rows of a query stand together, so a query is the place where its rows
start.  How many starts come before every 512th row is all that is held (a byte for 64 triples); the
way from there to a start is read off the index.

Shapes: Q distinct queries, T triples, N entities.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def lower_bound(values: np.ndarray, value: int, low: int, high: int) -> int:
    """First position in the ascending ``values[low:high]`` that is not below ``value``."""
    while low < high:
        middle = (low + high) // 2
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True)
def find_ranges(
    indptr: np.ndarray, row_relations: np.ndarray, anchors: np.ndarray, relations: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where the answers of each query (anchor, relation) lie: starts (B,), stops (B,)."""
    starts = np.empty(len(anchors), np.int64)
    stops = np.empty(len(anchors), np.int64)
    for query in range(len(anchors)):
        low, high = indptr[anchors[query]], indptr[anchors[query] + 1]
        starts[query] = lower_bound(row_relations, relations[query], low, high)
        stops[query] = lower_bound(row_relations, relations[query] + 1, starts[query], high)
    return starts, stops


@numba.njit(cache=True, nogil=True)
def narrow(
    ids: np.ndarray, starts: np.ndarray, stops: np.ndarray, first: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """The parts of ascending ranges of ``ids`` whose ids lie in [first, last): starts, stops."""
    lows = np.empty(len(starts), np.int64)
    highs = np.empty(len(starts), np.int64)
    for query in range(len(starts)):
        lows[query] = lower_bound(ids, first, starts[query], stops[query])
        highs[query] = lower_bound(ids, last, lows[query], stops[query])
    return lows, highs


@numba.njit(cache=True, nogil=True)
def mark_members(
    entities: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    candidates: np.ndarray,
    found: np.ndarray,
) -> None:
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


STEP = 512  # rows between two counts


class QueryList:
    """The pairs (anchor, relation) that have an answer, ordered by anchor, then by relation.

    indptr (N + 1,), relations (T,): of a `known.SideIndex`.
    step: rows between two counts; others than STEP are for tests.
    """

    def __init__(self, indptr: np.ndarray, relations: np.ndarray, step: int = STEP):
        self._index, self._step = (indptr, relations), step
        self._before = np.zeros(-(-len(relations) // step), np.int64)
        self._queries = _count_starts(*self._index, step, self._before)

    def __len__(self) -> int:
        return self._queries

    def find(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers (B,) int64 in [0, Q) -> anchors (B,), relations (B,), both int64."""
        anchors, relations = np.empty((2, len(numbers)), np.int64)
        _find(*self._index, self._step, self._before, numbers, anchors, relations)
        return anchors, relations


@numba.njit(cache=True, nogil=True)
def _count_starts(indptr: np.ndarray, relations: np.ndarray, step: int, before: np.ndarray) -> int:
    """Fills in how many queries start before each block of rows; returns how many there are."""
    count = 0
    for anchor in range(len(indptr) - 1):
        first = indptr[anchor]
        for row in range(first, indptr[anchor + 1]):
            if row % step == 0:
                before[row // step] = count
            count += row == first or relations[row] != relations[row - 1]
    return count


@numba.njit(cache=True, nogil=True)
def _find(
    indptr: np.ndarray,
    relations: np.ndarray,
    step: int,
    before: np.ndarray,
    numbers: np.ndarray,
    anchors: np.ndarray,
    found: np.ndarray,
) -> None:
    for i in range(len(numbers)):
        block = np.searchsorted(before, numbers[i], side="right") - 1
        row, count = block * step, before[block]
        anchor = np.searchsorted(indptr, row, side="right") - 1
        while True:
            while row == indptr[anchor + 1]:
                anchor += 1
            if row == indptr[anchor] or relations[row] != relations[row - 1]:
                if count == numbers[i]:
                    break
                count += 1
            row += 1
        anchors[i], found[i] = anchor, relations[row]
