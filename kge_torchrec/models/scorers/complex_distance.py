"""Sum of complex moduli between all pairs of rows, without the (b, K, D) intermediate in memory.

Shapes: C chunks, b queries, K candidates, D real numbers (D/2 complex ones) a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kge_torchrec.models.block_device import block_device
from kge_torchrec.models.scorers.distance import EPSILON, fused, is_fused
from kge_torchrec.models.scorers.pairwise import BLOCK_NUMBERS


def complex_distance(query: Tensor, rows: Tensor) -> Tensor:
    """(C, b, D), (C, K, D) -> (C, b, K): sum over k of |query_k - row_k|."""
    if is_fused(query):
        return fused("moduli", query, rows)
    return _ComplexDistance.apply(query, rows)


def _blocks(query: Tensor, rows: Tensor):
    """Slices of the b queries small enough that the pairwise differences stay in cache."""
    chunks, count, dim = query.shape
    step = max(1, BLOCK_NUMBERS[block_device(query)] // max(1, chunks * rows.shape[1] * dim))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _parts(query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Differences (real, imaginary) and their moduli, each (C, block, K, D/2)."""
    real = query[..., None, 0::2] - rows[:, None, :, 0::2]
    imaginary = query[..., None, 1::2] - rows[:, None, :, 1::2]
    modulus = torch.addcmul(real * real, imaginary, imaginary).add_(EPSILON).sqrt_()
    return real, imaginary, modulus


class _ComplexDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(query, rows)
        out = query.new_empty(query.shape[0], query.shape[1], rows.shape[1])
        for block in _blocks(query, rows):
            out[:, block] = _parts(query[:, block], rows)[2].sum(-1)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        query, rows = ctx.saved_tensors
        grad_query, grad_rows = torch.zeros_like(query), torch.zeros_like(rows)
        for block in _blocks(query, rows):
            real, imaginary, modulus = _parts(query[:, block], rows)
            slope = grad[:, block, :, None] / modulus
            for offset, part in ((0, real), (1, imaginary)):
                part *= slope
                grad_query[:, block, offset::2] = part.sum(2)
                grad_rows[..., offset::2] -= part.sum(1)
        return grad_query, grad_rows
