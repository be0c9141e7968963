"""Compiled searches in the filter index.

`filter_index` imports this file only for many queries: numba takes half a second to load.

Shapes: B queries, K candidates, T triples.
"""

from __future__ import annotations

import numpy as np

from kge_torchrec.kernels.jit import kernel


@kernel
def bounds(
    values: np.ndarray, starts: np.ndarray, stops: np.ndarray, first: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return where the values (T,) from ``first`` to ``stop`` - 1 start and stop in ranges (B,).

    Values ascend within each range.
    """
    out = np.empty((2, len(starts)), np.int64)
    for query in range(len(starts)):
        low = starts[query]
        for end, value in enumerate((first, stop)):
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
    rows: np.ndarray,
    is_member: np.ndarray,
) -> None:
    """Set ``is_member[b, k]`` where ``candidates[rows[b], k]`` is in query b's ascending range."""
    for query in range(len(starts)):
        low, high = starts[query], stops[query]
        if low == high:
            continue
        first, last, row = entities[low], entities[high - 1], rows[query]
        for column in range(candidates.shape[1]):
            candidate = candidates[row, column]
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
