"""Compiled searches in the filter index, and the list of its distinct queries.

`filter_index` imports this file only for many queries: numba takes a second to load.

Shapes: B queries, K candidates, Q distinct queries, T triples, N entities.
"""

from __future__ import annotations

import numpy as np

from kge_torchrec.kernels.jit import kernel


@kernel
def bounds(
    values: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    lows: np.ndarray,
    highs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return where the values from low to high - 1 lie in ascending ranges of ``values``.

    Args:
        values: (T,) ids, ascending within each range.
        starts: (B,) int64, where the ranges start.
        stops: (B,) int64, where they stop.
        lows: (B,) int64.
        highs: (B,) int64.

    Returns:
        Starts (B,) and stops (B,), int64.
    """
    out = np.empty((2, len(starts)), np.int64)
    for query in range(len(starts)):
        low = starts[query]
        for end, value in enumerate((lows[query], highs[query])):
            high = stops[query]
            while low < high:
                middle = (low + high) // 2
                if values[middle] < value:
                    low = middle + 1
                else:
                    high = middle
            out[end, query] = low
    return out[0], out[1]


@kernel
def mark_members(
    entities: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    candidates: np.ndarray,
    is_member: np.ndarray,
) -> None:
    """Set ``found[b, k]`` where ``candidates[b, k]`` is in the ascending range of query b."""
    for query in range(len(starts)):
        low, high = starts[query], stops[query]
        if low == high:
            continue
        first, last = entities[low], entities[high - 1]
        for column in range(candidates.shape[1]):
            candidate = candidates[query, column]
            if candidate < first or candidate > last:
                continue
            # The steps depend on the range's length only, so none is mispredicted.
            position, size = low, high - low
            while size > 1:
                half = size // 2
                position += half * (entities[position + half] <= candidate)
                size -= half
            if entities[position] == candidate:
                is_member[query, column] = True


STEP = 512  # rows between two counts


class QueryList:
    """The pairs (anchor, relation) that have an answer, ordered by anchor, then by relation.

    In the filter index all rows of a query stand together, so a query is the place where its rows
    start.  Only the number of starts before every 512th row is in memory (a byte for 64 triples);
    the way from there to a start is read off the index.

    Args:
        indptr, relations: (N + 1,) and (T,), of a `filter_index.SideIndex`.
        step: Rows between two counts; values other than STEP are for tests.
    """

    def __init__(self, indptr: np.ndarray, relations: np.ndarray, step: int = STEP):
        self._index, self._step = (indptr, relations), step
        self._before = np.zeros(-(-len(relations) // step), np.int64)
        self._queries = _count_starts(*self._index, step, self._before)

    def __len__(self) -> int:
        return self._queries

    def find(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the anchors (B,) and relations (B,), int64, of queries by number in [0, Q)."""
        queries = np.empty((2, len(numbers)), np.int64)
        _find(*self._index, self._step, self._before, numbers, queries)
        return queries[0], queries[1]


@kernel
def _count_starts(indptr: np.ndarray, relations: np.ndarray, step: int, before: np.ndarray) -> int:
    """Fill in how many queries start before each block of rows; return how many there are."""
    count = 0
    for anchor in range(len(indptr) - 1):
        first = indptr[anchor]
        for row in range(first, indptr[anchor + 1]):
            if row % step == 0:
                before[row // step] = count
            count += row == first or relations[row] != relations[row - 1]
    return count


@kernel
def _find(
    indptr: np.ndarray,
    relations: np.ndarray,
    step: int,
    before: np.ndarray,
    numbers: np.ndarray,
    queries: np.ndarray,
) -> None:
    """Walk from the nearest count to each query, and fill in its anchor and relation."""
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
        queries[0, i], queries[1, i] = anchor, relations[row]
