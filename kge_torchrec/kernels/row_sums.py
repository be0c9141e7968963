"""Sums of the gradients of a row, on a CPU: each row has one writer, whatever the threads.

Shapes: U rows, M places that picked them, D numbers a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.blocks import block_kernel
from kge_torchrec.kernels.jit import kernel

PARTS = 4  # that gradients come in: head, tail and the candidates of both sides
_ROWS = 64  # that a thread takes at once


@torch.library.custom_op("kge_torchrec::sums_by_row", mutates_args=(), device_types="cpu")
def sums_by_row(index: Tensor, parts: list[Tensor], count: int) -> Tensor:
    """(U, D): row u has the sum of the gradients at the places where index is u, in their order.

    index: (M,) int64 in [0, U), not checked here; parts: (m, D) float32 each, M rows in all, copied
    if they are more than ``PARTS``; count: U.
    """
    if len(parts) > PARTS:
        parts = [torch.cat(parts)]
    dim = parts[0].shape[1]
    out = torch.empty(count, dim)
    starts = np.cumsum([0, *map(len, parts)])
    ends = np.full(PARTS, starts[-1])
    ends[: len(parts)] = starts[1:]
    given = [part.detach().contiguous().numpy() for part in parts]
    given += [given[0]] * (PARTS - len(given))
    places, bounds = by_row(index.numpy(), count)
    _sum_rows(count, len(index) * dim, places, bounds, ends, *given, out.numpy())
    return out


@sums_by_row.register_fake
def _shape(index: Tensor, parts: list[Tensor], count: int) -> Tensor:
    return parts[0].new_empty(count, parts[0].shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    index, parts, _ = inputs
    ctx.save_for_backward(index)
    ctx.sizes = [len(part) for part in parts]


def _backward(ctx: Any, grad: Tensor) -> tuple[None, list[Tensor], None]:
    """Every part has the gradients of the rows that it was added to."""
    (index,) = ctx.saved_tensors
    return None, [grad.index_select(0, places) for places in index.split(ctx.sizes)], None


sums_by_row.register_autograd(_backward, setup_context=_keep)


@kernel
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
    """Part p has the places from ends[p - 1] to ends[p]."""
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
