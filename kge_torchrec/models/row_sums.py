"""Sums of the gradients of a row, on a CPU: each row has one writer, whatever the threads.

And what all kernels here begin with: how they are compiled (``JIT``), and how many threads they are
worth (``threads_for``, ``in_blocks``).

Shapes: U rows, M places that picked them, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

# What says nothing of fastmath has it of the caller that happens to compile it first.
JIT: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "fastmath": False}
PARTS = 4  # that gradients come in: head, tail and the candidates of both sides
_ROWS = 64  # that a thread takes at once
# Below this many numbers, waking a second thread costs more than it saves.
SERIAL_NUMBERS = 1 << 17


def sums_by_row(index: Tensor, parts: tuple[Tensor, ...], count: int) -> Tensor:
    """(U, D): row u has the sum of the gradients at the places where index is u, in their order.

    index: (M,) int64 in [0, U), not checked here; parts: (m, D) float32 each, M rows in all, copied
    if they are more than ``PARTS``; count: U.
    """
    if len(parts) > PARTS:
        parts = (torch.cat(parts),)
    dim = parts[0].shape[1]
    out = torch.empty(count, dim)
    starts = np.cumsum([0, *map(len, parts)])
    ends = np.full(PARTS, starts[-1])
    ends[: len(parts)] = starts[1:]
    given = [part.contiguous().numpy() for part in parts]
    given += [given[0]] * (PARTS - len(given))
    places, bounds = by_row(index.numpy(), count)
    blocks = -(-count // _ROWS)
    if threads_for(blocks, len(index) * dim) == 1:
        _sum_rows(0, blocks, places, bounds, ends, *given, out.numpy())
    else:
        _sum_in_parallel(blocks, places, bounds, ends, *given, out.numpy())
    return out


def threads_for(blocks: int, numbers: int) -> int:
    """How many threads work on so many blocks of so many numbers; numba is told so.

    A process of one thread never is: starting numba's threads took a third of its speed, in
    everything that torch did.
    """
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set as it is loaded
    threads = max(1, min(torch.get_num_threads(), most, blocks))
    if threads == 1 or numbers < SERIAL_NUMBERS:
        return 1
    numba.set_num_threads(threads)
    return threads


def in_blocks(
    serial: Callable[..., None],
    in_parallel: Callable[..., None],
    count: int,
    block: int,
    numbers: int,
    given: tuple[Any, ...],
) -> None:
    """A kernel over ``count`` things, a block of them at a time, on as many threads as pay.

    It is called as serial(0, count, *given) or in_parallel(count, *given).
    """
    if threads_for(-(-count // block), numbers) == 1:
        serial(0, count, *given)
    else:
        in_parallel(count, *given)


@njit(**JIT)
def by_row(picked: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Row u is picked at places[bounds[u]:bounds[u + 1]], in their order: a counting sort."""
    bounds = np.zeros(rows + 1, np.int64)
    for row in picked:
        bounds[row + 1] += 1
    for row in range(rows):
        bounds[row + 1] += bounds[row]
    filled, places = bounds[:rows].copy(), np.empty(picked.shape[0], np.int64)
    for place in range(picked.shape[0]):
        row = picked[place]
        places[filled[row]] = place
        filled[row] += 1
    return places, bounds


@njit(**JIT)
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
    """Blocks of ``_ROWS`` rows.  Part p has the places from ends[p - 1] to ends[p]."""
    for row in range(start * _ROWS, min(stop * _ROWS, out.shape[0])):
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
                total[:] = grad
            else:
                for d in range(total.shape[0]):
                    total[d] += grad[d]


@njit(parallel=True, **JIT)
def _sum_in_parallel(
    blocks: int,
    places: np.ndarray,
    bounds: np.ndarray,
    ends: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    third: np.ndarray,
    fourth: np.ndarray,
    out: np.ndarray,
) -> None:
    for block in prange(blocks):
        _sum_rows(block, block + 1, places, bounds, ends, first, second, third, fourth, out)
