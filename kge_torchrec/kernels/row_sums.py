"""Sums of the gradients of a row, on a CPU: each row has one writer for any number of threads.

Shapes: U rows, M vectors, D elements per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.jit import block_kernel, kernel
from kge_torchrec.kernels.library import arrays, operator

PARTS = 4  # usual parts of the gradients: head, tail and the candidates of both sides
_ROWS = 64  # rows per block of a thread


def _sums(index: Tensor, parts: list[Tensor], count: int) -> Tensor:
    """The CPU implementation of ``sums_by_row``; does not check the index."""
    if len(parts) > PARTS:
        parts = [torch.cat(parts)]
    dim = parts[0].shape[1]
    out = torch.empty(count, dim)
    bounds = np.cumsum([0, *map(len, parts)])
    ends = np.full(PARTS, bounds[-1])
    ends[: len(parts)] = bounds[1:]
    gradients = [*arrays(*(part.contiguous() for part in parts))]
    gradients += [gradients[0]] * (PARTS - len(gradients))
    places, bounds = by_row(index.numpy(), count)
    _sum_rows(count, len(index) * dim, places, bounds, ends, *gradients, out.numpy())
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    index, parts, _ = inputs
    ctx.save_for_backward(index)
    ctx.sizes = [len(part) for part in parts]


def _backward(ctx: Any, grad: Tensor) -> tuple[None, list[Tensor], None]:
    """Return for each part the gradients of the rows that it was added to."""
    (index,) = ctx.saved_tensors
    return None, [grad.index_select(0, places) for places in index.split(ctx.sizes)], None


sums_by_row = operator(
    "sums_by_row",
    _sums,
    lambda index, parts, count: parts[0].new_empty(count, parts[0].shape[1]),
    save=_save,
    backward=_backward,
)


def check_candidates(index: Tensor, count: int) -> None:
    """Raise IndexError unless candidates (C, K) are positions in a table of ``count`` rows."""
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise IndexError(f"candidates {int(index.min())} to {int(index.max())} of {count} rows")


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


@block_kernel(_ROWS)
def _sum_rows(
    start: int,
    stop: int,
    places: np.ndarray,
    bounds: np.ndarray,
    ends: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    third: np.ndarray,
    fourth: np.ndarray,
    out: np.ndarray,
) -> None:
    """Sum the gradients of each row; part p has the places from ends[p - 1] to ends[p]."""
    for row in range(start, stop):
        total = out[row]
        if bounds[row] == bounds[row + 1]:
            total[:] = np.float32(0)
        for at in range(bounds[row], bounds[row + 1]):
            place = places[at]
            if place < ends[0]:
                grad = first[place]
            elif place < ends[1]:
                grad = second[place - ends[0]]
            elif place < ends[2]:
                grad = third[place - ends[1]]
            else:
                grad = fourth[place - ends[2]]
            if at == bounds[row]:
                for d in range(total.shape[0]):
                    total[d] = grad[d]
            else:
                for d in range(total.shape[0]):
                    total[d] += grad[d]
