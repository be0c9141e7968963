"""Distances of all pairs where training runs on CUDA, by kernels that Inductor generates.

There the backward of ``torch.cdist`` has all (b, K, D) differences in memory, and its forward a
thread block for every pair; the plain formulas would have several such tensors, block after block.
Brings: no tensor of pairs. 1,024 queries, 512 candidates and 128 elements would take 256 MiB each.

Here each sum is one kernel, which reads queries and rows and writes its (C, b, K), (C, b, D) or
(C, K, D) only. Inductor does keep a tensor of pairs that several others need and that is computed
from more than four values: so each gradient is a function of its own, which computes differences
anew, and its inputs have been computed before.

Shapes: C chunks, b queries, K candidates, D elements (D/2 complex numbers) per row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from kge_torchrec.kernels.library import CPU_AND_CUDA, EPSILON, Distance, Mapped, operator

Kind = Distance | Mapped


def fused(kind: Kind, query: Tensor, rows: Tensor, maps: Tensor | None = None) -> Tensor:
    """Compute distances by kernels that torch compiles at their first use.

    Half precision is computed in float32, as by torch.cdist under autocast.

    Args:
        kind: The distance.
        query: (C, b, D).
        rows: (C, K, D).
        maps: (C, b, D), for the kinds of ``Mapped``.

    Returns:
        (C, b, K).
    """
    inputs = [query, rows] if maps is None else [query, rows, maps]
    inputs = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]
    if torch.compiler.is_compiling():
        inputs = [in_memory(x) for x in inputs]
    return _Fused.apply(kind, *inputs)


def _copy(x: Tensor) -> Tensor:
    """Copy x, so that Inductor reads it and does not compute x anew for every pair."""
    return x.clone()


in_memory = operator(
    "in_memory",
    _copy,
    torch.empty_like,
    backward=lambda ctx, grad: grad,
    devices=CPU_AND_CUDA,
)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Kind, *inputs: Tensor) -> Tensor:
        value, known = _kernel(_value, kind, inputs[0])(kind, *inputs)
        ctx.save_for_backward(known, *inputs)
        ctx.kind = kind
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        known, *inputs = ctx.saved_tensors
        gradients = _GRADIENTS[: len(inputs)]
        kernels = (_kernel(gradient, ctx.kind, inputs[0]) for gradient in gradients)
        return None, *(kernel(ctx.kind, grad, known, *inputs) for kernel in kernels)


def _kernel(formula: Callable[..., Any], kind: Kind, query: Tensor) -> Callable[..., Any]:
    """Return the formula, compiled; inside compiled code, the formula itself."""
    if torch.compiler.is_compiling():
        return formula
    if query.device.type == "meta":
        return partial(_planned, formula)
    return _compiled(formula, kind, query.dtype)


@cache
def _compiled(formula: Any, kind: Kind, dtype: torch.dtype) -> Callable[..., Any]:
    """Compile a formula for one kind and dtype, from a code object of its own.

    torch counts recompilations by code object and runs eagerly after the eighth, with all pairs in
    memory. A process that tunes several distances would get there.
    """
    code = formula.__code__.replace(co_name=f"{formula.__name__}_{kind}")
    return torch.compile(FunctionType(code, formula.__globals__, None, formula.__defaults__))


# One operation per kernel for plans, which count shapes on the meta device. Nothing runs them.
def _never(one: Tensor, other: Tensor) -> Tensor:
    raise NotImplementedError


VALUE_OF_PAIRS = operator(
    "value_of_pairs",
    _never,
    lambda query, rows: query.new_empty(*query.shape[:2], rows.shape[1]),
).overloadpacket
GRADIENT_OF_PAIRS = operator(
    "gradient_of_pairs", _never, lambda grad, of: torch.empty_like(of)
).overloadpacket


def _planned(formula: Callable[..., Any], kind: Kind, *args: Tensor) -> Any:
    """Return the formula's results on the meta device, by the operations above."""
    if formula is not _value:
        grad, _, *inputs = args
        return GRADIENT_OF_PAIRS(grad, inputs[_GRADIENTS.index(formula)])
    value = VALUE_OF_PAIRS(*args[:2])
    return value, value if kind == "euclidean" else None


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


# The gradients of queries (C, b, D), rows (C, K, D) and maps (C, b, D), from those of the distances
# (C, b, K) and what ``_value`` knows of each pair. Those of rows and maps have differences of the
# opposite sign: Inductor would keep differences that several gradients share.


def _gradient_of_query(
    kind: Kind,
    grad: Tensor,
    known: Tensor | None,
    query: Tensor,
    rows: Tensor,
    maps: Tensor | None = None,
) -> Tensor:
    return _summed(kind, grad, known, _difference(query, rows, maps), 2)


def _gradient_of_rows(
    kind: Kind,
    grad: Tensor,
    known: Tensor | None,
    query: Tensor,
    rows: Tensor,
    maps: Tensor | None = None,
) -> Tensor:
    difference = -_difference(query, rows, maps)
    factor = None if maps is None else maps[:, :, None]
    return _summed(kind, grad, known, difference, 1, factor)


def _gradient_of_maps(
    kind: Kind, grad: Tensor, known: Tensor | None, query: Tensor, rows: Tensor, maps: Tensor
) -> Tensor:
    return _summed(kind, grad, known, -_difference(query, rows, maps), 2, rows[:, None])


_GRADIENTS = _gradient_of_query, _gradient_of_rows, _gradient_of_maps


def _summed(
    kind: Kind,
    grad: Tensor,
    known: Tensor | None,
    difference: Tensor,
    dim: int,
    factor: Tensor | None = None,
) -> Tensor:
    """Sum the gradients by the differences (C, b, K, D), times a factor if any, over b or K."""
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
    return (gradients if factor is None else gradients * factor).sum(dim)
