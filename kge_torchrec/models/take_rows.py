"""rows[index] with a backward that sums duplicates in a fixed order, so that runs repeat bitwise.

Shapes: U rows, M indices, D numbers a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """(U, D), (M,) int64 -> (M, D)"""
    return _TakeRows.apply(rows, index)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.count, grad.shape[1])
        return out.index_add_(0, index, grad), None
