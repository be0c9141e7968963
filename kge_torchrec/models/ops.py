"""What scorers compute with: products of complex numbers, and distances of all pairs of rows.

**Complex numbers.**  Rows of D real numbers are read as D/2 complex ones, interleaved: (re, im, re,
im, ...).  Products come in two forms.  With torch's complex numbers they are one operation, on a
CPU three times as fast as the eight real ones; but Inductor compiles no complex numbers, so that
what is compiled takes the real form, which it makes one kernel of, with what is around it.

**Pairs.**  For scores that are no matrix product a block of pairs at a time is expanded, and
expanded again for its gradient, so that the (b, K, D) intermediates are never in memory whole.  A
pair's score is computed from its own numbers alone, so that blocks do not change its bits.

**Distances** keep their digits.  The product form of the Euclidean distance loses digits where
distances are small, and ranking would then disagree with the scores of single triples.  On a CPU,
and wherever nothing is differentiated, ``torch.cdist`` computes them.  On CUDA its backward has all
(b, K, D) differences in memory, and its forward a thread block for every pair, so that training
takes ``fused`` there: of each formula Inductor makes one kernel that reads queries and rows and
writes its sums alone.  Ranking stays with kernels that compute a pair alike wherever it stands, for
ties to remain ties.

Shapes: C chunks, b queries, K rows, D numbers (D/2 complex ones) a row.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Distance = Literal["euclidean", "manhattan", "moduli"]
EPSILON = 1e-12  # under the root of a modulus, as in RotatE.similarity
# Numbers of a block's intermediates: what stays in a CPU's L2 cache, enough work for a GPU.
BLOCK_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 25}
_EXACT = "donot_use_mm_for_euclid_dist"
_planned_for = ContextVar("planned_for", default="cuda")


def block_device(x: Tensor) -> str:
    """Whose block sizes a computation takes, "cpu" or "cuda".

    Tensors on the meta device stand for what they plan for.
    """
    kind = x.device.type
    return _planned_for.get() if kind == "meta" else "cpu" if kind == "cpu" else "cuda"


@contextmanager
def planning_for(kind: str) -> Iterator[None]:
    """Inside, tensors on the meta device stand for those of "cpu" or "cuda"."""
    token = _planned_for.set(kind)
    try:
        yield
    finally:
        _planned_for.reset(token)


def pairwise(
    score: Callable[..., Tensor], queries: Sequence[Tensor], rows: Sequence[Tensor], width: int
) -> Tensor:
    """score(*queries, *rows) for all pairs of a chunk: (C, b, K).

    queries: (C, b, ·) each, handed to score as (C, block, 1, ·); rows: (C, K, ·) each, handed to
    it as (C, 1, K, ·).  width: numbers that score expands a pair to.
    """
    chunks, count = queries[0].shape[:2]
    rows = [x[:, None] for x in rows]
    numbers = BLOCK_NUMBERS[block_device(queries[0])]
    step = max(1, numbers // max(1, chunks * rows[0].shape[2] * width))
    parts = []
    for start in range(0, max(1, count), step):
        block = [x[:, start : start + step, None] for x in queries]
        if step < count and torch.is_grad_enabled():
            parts.append(checkpoint(score, *block, *rows, use_reentrant=False))
        else:
            parts.append(score(*block, *rows))
    return torch.cat(parts, 1)


def as_complex(rows: Tensor) -> Tensor:
    """(..., D) real -> (..., D/2) complex view."""
    return torch.view_as_complex(rows.unflatten(-1, (-1, 2)))


def as_real(numbers: Tensor) -> Tensor:
    """(..., D/2) complex -> (..., D) real view."""
    return torch.view_as_real(numbers).flatten(-2)


def parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts, (..., D/2) each."""
    return rows.unflatten(-1, (-1, 2)).unbind(-1)


def times(rows: Tensor, factor: Tensor, conjugate: bool = False) -> Tensor:
    """Products number by number, of the conjugate of the factor if so: (..., D), (..., D)."""
    if torch.compiler.is_compiling():
        return _times(parts(rows), parts(factor), conjugate)
    numbers = as_complex(factor)
    return as_real(as_complex(rows) * (numbers.conj() if conjugate else numbers))


def rotated(rows: Tensor, phase: Tensor) -> Tensor:
    """Each number turned by an angle: (..., D), (..., D/2) -> (..., D)."""
    if torch.compiler.is_compiling():
        return _times(parts(rows), (phase.cos(), phase.sin()), conjugate=False)
    return as_real(as_complex(rows) * torch.polar(torch.ones_like(phase), phase))


def _times(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], conjugate: bool) -> Tensor:
    """The real form."""
    (real, imaginary), (x, y) = one, other
    if conjugate:
        y = -y
    return torch.stack([real * x - imaginary * y, real * y + imaginary * x], -1).flatten(-2)


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
    def forward(ctx: Any, query: Tensor, rows: Tensor, distance: Distance) -> Tensor:
        value = _kernel(_value)(distance, query, rows)
        ctx.save_for_backward(query, rows, value)
        ctx.distance = distance
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        given = ctx.distance, *ctx.saved_tensors, grad
        return _kernel(_gradient_of_query)(*given), _kernel(_gradient_of_rows)(*given), None


def _kernel(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The formula, compiled; in the middle of compiling it becomes part of what is compiled."""
    return formula if torch.compiler.is_compiling() else _compiled(formula)


@cache
def _compiled(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
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


def complex_distance(query: Tensor, rows: Tensor) -> Tensor:
    """(C, b, D), (C, K, D) -> (C, b, K): sum over k of |query_k - row_k|."""
    if is_fused(query):
        return fused("moduli", query, rows)
    return _ComplexDistance.apply(query, rows)


def _query_blocks(query: Tensor, rows: Tensor) -> Iterator[slice]:
    """Slices of the b queries small enough that the pairwise differences stay in cache."""
    chunks, count, dim = query.shape
    step = max(1, BLOCK_NUMBERS[block_device(query)] // max(1, chunks * rows.shape[1] * dim))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _differences(query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Differences (real, imaginary) and their moduli, each (C, block, K, D/2)."""
    real = query[..., None, 0::2] - rows[:, None, :, 0::2]
    imaginary = query[..., None, 1::2] - rows[:, None, :, 1::2]
    modulus = torch.addcmul(real * real, imaginary, imaginary).add_(EPSILON).sqrt_()
    return real, imaginary, modulus


class _ComplexDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(query, rows)
        out = query.new_empty(query.shape[0], query.shape[1], rows.shape[1])
        for block in _query_blocks(query, rows):
            out[:, block] = _differences(query[:, block], rows)[2].sum(-1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        query, rows = ctx.saved_tensors
        grad_query, grad_rows = torch.zeros_like(query), torch.zeros_like(rows)
        for block in _query_blocks(query, rows):
            real, imaginary, modulus = _differences(query[:, block], rows)
            slope = grad[:, block, :, None] / modulus
            for offset, part in ((0, real), (1, imaginary)):
                part *= slope
                grad_query[:, block, offset::2] = part.sum(2)
                grad_rows[..., offset::2] -= part.sum(1)
        return grad_query, grad_rows
