"""Several selections of the same rows, whose gradients meet in one buffer.

Indexing separately would give autograd one gradient of all rows per selection, to be added up.

Shapes: U rows, M indices, D numbers a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def take_rows(rows: Tensor, index: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """rows[index] in parts of the given sizes: (U, D), (M,) int64 -> (size, D) each.

    On a CPU duplicate indices sum their gradients in a fixed order, so that runs repeat bitwise.
    """
    return _TakeRows.apply(rows, index, sizes)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(index)
        ctx.count, ctx.sizes = rows.shape[0], sizes
        return tuple(rows.index_select(0, part) for part in index.split(sizes))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        out = grads[0].new_zeros(ctx.count, grads[0].shape[1])
        for part, grad in zip(index.split(ctx.sizes), grads, strict=True):
            out.index_add_(0, part, grad)
        return out, None, None
