"""Distances of all pairs where training runs on CUDA, by kernels that Inductor generates.

Brings: no tensor of pairs. 1,024 queries, 512 candidates and 128 elements would take 256 MiB each,
also in the backward of ``torch.cdist``.

Each sum is one kernel, which reads queries and rows and writes its (C, b, K), (C, b, D) or
(C, K, D) only. Inductor does keep a tensor of pairs that several others need and that is computed
from more than four values: so each gradient is a function of its own, which computes differences
anew, and its inputs have been computed before.

Shapes: C chunks, b queries, K candidates, D elements (D/2 complex numbers) per row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from kge_torchrec.kernels.library import EPSILON, Distance, Mapped, operator

Kind = Distance | Mapped


def fused(kind: Kind, query: Tensor, rows: Tensor, maps: Tensor | None = None) -> Tensor:
    """Compute ``comparisons.distance`` by kernels that torch compiles at their first use.

    Half precision is computed in float32, as by torch.cdist under autocast.
    """
    inputs = [query, rows] if maps is None else [query, rows, maps]
    inputs = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]
    if torch.compiler.is_compiling():
        inputs = [in_memory(x) for x in inputs]
    return _Fused.apply(kind, *inputs)


def _copy(x: Tensor) -> Tensor:
    """Copy x, so that Inductor reads it and does not compute x anew for every pair."""
    return x.clone()


in_memory = operator("in_memory", _copy, torch.empty_like, backward=lambda ctx, grad: grad)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Kind, *inputs: Tensor) -> Tensor:
        value, known = _computed(_value, (kind,), *inputs)
        ctx.save_for_backward(known, *inputs)
        ctx.kind = kind
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = grad, *ctx.saved_tensors
        of_inputs = (_computed(_gradient, (ctx.kind, i), *tensors) for i in range(len(tensors) - 2))
        return None, *of_inputs


def _computed(formula: Callable[..., Any], choices: tuple[Any, ...], *tensors: Tensor) -> Any:
    """Run a formula as a kernel; inside compiled code it becomes a part of that."""
    if torch.compiler.is_compiling():
        return formula(*choices, *tensors)
    return _compiled(formula, choices, tensors[0].dtype)(*choices, *tensors)


@cache
def _compiled(formula: Any, choices: tuple[Any, ...], dtype: torch.dtype) -> Callable[..., Any]:
    """Compile a formula for one kind, input and dtype, from a code object of its own.

    torch counts recompilations by code object and runs eagerly after the eighth, with all pairs in
    memory. A process that tunes several distances would get there.
    """
    code = formula.__code__.replace(co_name="_".join(map(str, (formula.__name__, *choices))))
    return torch.compile(FunctionType(code, formula.__globals__, None, formula.__defaults__))


def _difference(query: Tensor, rows: Tensor, maps: Tensor | None) -> Tensor:
    """Return differences (C, b, K, D), which compiled code never has in memory."""
    points = rows[:, None] if maps is None else maps[:, :, None] * rows[:, None]
    return query[:, :, None] - points


def _moduli(difference: Tensor) -> Tensor:
    """Return the moduli of complex numbers: (..., D) -> (..., D/2)."""
    real, imaginary = difference[..., 0::2], difference[..., 1::2]
    return (real.square() + imaginary.square() + EPSILON).sqrt()


def _value(
    kind: Kind, query: Tensor, rows: Tensor, maps: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the distances (C, b, K) and what gradients need of each pair, (C, b, K) or None."""
    difference = _difference(query, rows, maps)
    if kind in ("manhattan", "scaled_manhattan"):
        return difference.abs().sum(-1), None
    if kind == "moduli":
        return _moduli(difference).sum(-1), None
    squares = difference.square().sum(-1)
    if kind == "scaled_squares":
        return squares, None
    value = squares.sqrt()
    return value, value


def _gradient(
    kind: Kind,
    i: int,
    grad: Tensor,
    known: Tensor | None,
    query: Tensor,
    rows: Tensor,
    maps: Tensor | None = None,
) -> Tensor:
    """Return the gradient of an input by its number: query, rows or maps.

    ``known`` is what ``_value`` knows of each pair. The gradients of rows and maps have differences
    of the opposite sign: Inductor would keep differences that several gradients share.
    """
    difference, dim = _difference(query, rows, maps), 1 if i == 1 else 2
    if i > 0:
        difference = -difference
    if kind == "moduli":
        # Both parts share a value that is computed from four others, without the factor of grad.
        moduli = _moduli(difference)
        units = [difference[..., part::2] / moduli for part in (0, 1)]
        return torch.stack([(grad[..., None] * unit).sum(dim) for unit in units], -1).flatten(-2)
    if kind in ("manhattan", "scaled_manhattan"):
        gradients = grad[..., None] * difference.sign()
    elif kind == "scaled_squares":
        gradients = 2 * grad[..., None] * difference
    else:
        assert known is not None  # of "euclidean": 0 where rows are equal, as in torch.cdist
        gradients = torch.where(known > 0, grad / known, 0)[..., None] * difference
    if maps is not None and i > 0:
        gradients = gradients * (maps[:, :, None] if i == 1 else rows[:, None])
    return gradients.sum(dim)
