"""Distances between all pairs of rows that keep their digits.

The product form of the Euclidean distance loses digits where distances are small, and ranking
would then disagree with the scores of single triples.

On a CPU, and wherever nothing is differentiated, ``torch.cdist`` computes them.  On CUDA its
backward has all (b, K, D) differences in memory, and its forward a thread block for every pair, so
that training takes ``fused`` there: of each formula below Inductor makes one kernel that reads
queries and rows and writes its sums alone.  Ranking stays with kernels that compute a pair alike
wherever it stands, for ties to remain ties.

Shapes: C chunks, b queries, K rows, D numbers a row.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Distance = Literal["euclidean", "manhattan", "moduli"]
EPSILON = 1e-12  # under the root of a modulus, as in RotatE.similarity
_EXACT = "donot_use_mm_for_euclid_dist"


def euclidean(query: Tensor, rows: Tensor) -> Tensor:
    """(C, b, D), (C, K, D) -> (C, b, K)"""
    if is_fused(query):
        return fused("euclidean", query, rows)
    return torch.cdist(query, rows, p=2.0, compute_mode=_EXACT)


def manhattan(query: Tensor, rows: Tensor) -> Tensor:
    """(C, b, D), (C, K, D) -> (C, b, K)"""
    if is_fused(query):
        return fused("manhattan", query, rows)
    return torch.cdist(query, rows, p=1.0)


def is_fused(query: Tensor) -> bool:
    """Whether ``fused`` is to be taken: training on CUDA, where Triton can compile."""
    if query.device.type != "cuda":
        return False
    return torch.compiler.is_compiling() or (torch.is_grad_enabled() and _has_compiler())


@cache
def _has_compiler() -> bool:
    """Triton needs a C compiler for what launches its kernels."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(found) and importlib.util.find_spec("triton") is not None


def fused(distance: Distance, query: Tensor, rows: Tensor) -> Tensor:
    """(C, b, D), (C, K, D) -> (C, b, K), by kernels that torch compiles at their first use.

    "moduli" is the sum of the moduli of D/2 complex numbers.  Half precision is computed in
    float32, as autocast has it of torch.cdist.
    """
    query, rows = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, rows))
    return _Fused.apply(query, rows, distance)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, rows: Tensor, distance: Distance) -> Tensor:
        value = _kernel(_value)(distance, query, rows)
        ctx.save_for_backward(query, rows, value)
        ctx.distance = distance
        return value

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        given = ctx.distance, *ctx.saved_tensors, grad
        return _kernel(_gradient_of_query)(*given), _kernel(_gradient_of_rows)(*given), None


def _kernel(formula):
    """The formula, compiled; in the middle of compiling it becomes part of what is compiled."""
    return formula if torch.compiler.is_compiling() else _compiled(formula)


@cache
def _compiled(formula):
    return torch.compile(formula)


def _value(distance: Distance, query: Tensor, rows: Tensor) -> Tensor:
    difference = query[:, :, None] - rows[:, None]
    if distance == "manhattan":
        return difference.abs().sum(-1)
    if distance == "euclidean":
        return difference.square().sum(-1).sqrt()
    return _moduli(difference).sum(-1)


def _gradient_of_query(
    distance: Distance, query: Tensor, rows: Tensor, value: Tensor, grad: Tensor
) -> Tensor:
    return _slopes(distance, query[:, :, None] - rows[:, None], value, grad).sum(2)


def _gradient_of_rows(
    distance: Distance, query: Tensor, rows: Tensor, value: Tensor, grad: Tensor
) -> Tensor:
    # The differences anew, and the other way round, lest they be kept as common to both.
    return _slopes(distance, rows[:, None] - query[:, :, None], value, grad).sum(1)


def _slopes(distance: Distance, difference: Tensor, value: Tensor, grad: Tensor) -> Tensor:
    """Gradients by the differences, (C, b, K, D); never in memory once compiled."""
    if distance == "manhattan":
        return grad[..., None] * difference.sign()
    if distance == "euclidean":  # 0 where rows are equal, as torch.cdist has it
        return torch.where(value > 0, grad / value, 0)[..., None] * difference
    per_number = grad[..., None] / _moduli(difference)
    return per_number[..., None].expand(*per_number.shape, 2).flatten(-2) * difference


def _moduli(difference: Tensor) -> Tensor:
    """(..., D) -> (..., D/2)"""
    real, imaginary = difference[..., 0::2], difference[..., 1::2]
    return (real.square() + imaginary.square() + EPSILON).sqrt()
