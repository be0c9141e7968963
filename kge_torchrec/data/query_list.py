"""The distinct queries of a graph by number, without a list of them.

In the filter index all rows of a query stand together, so a query is the place where its rows
start.  How many starts come before every 512th row is all that is held (a byte for 64 triples); the
way from there to a start is read off the index.

Shapes: Q distinct queries, T triples, N entities.
"""

from __future__ import annotations

import numba
import numpy as np

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
def _count_starts(indptr, relations, step, before):
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
def _find(indptr, relations, step, before, numbers, anchors, found):
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
