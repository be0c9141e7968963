"""Ids on a CPU: places sorted by row, and a check of their range.

Shapes: M ids, U rows.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kge_torchrec.kernels.jit import kernel


def check_within(name: str, ids: Tensor, count: int) -> None:
    """Raise IndexError, which says what the ids are, unless all of them are in [0, count)."""
    if ids.numel():
        low, high = map(int, ids.aminmax())
        if low < 0 or high >= count:
            raise IndexError(f"{name}: {low} to {high} are not all in [0, {count})")


@kernel
def by_row(row_of_place: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort places by their row, by a counting sort.

    Args:
        row_of_place: (M,) the row of each place, in [0, rows).
        rows: U.

    Returns:
        Places (M,) and bounds (U + 1,): row u has places[bounds[u]:bounds[u + 1]], in order.
    """
    bounds = np.zeros(rows + 1, np.int64)
    for row in row_of_place:
        bounds[row + 1] += 1
    for row in range(rows):
        bounds[row + 1] += bounds[row]
    filled, places = bounds[:rows].copy(), np.empty(row_of_place.shape[0], np.int64)
    for place in range(row_of_place.shape[0]):
        row = row_of_place[place]
        places[filled[row]] = place
        filled[row] += 1
    return places, bounds
