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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kge_torchrec.kernels.library import EPSILON, Distance, Mapped

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


@torch.library.custom_op("kge_torchrec::in_memory", mutates_args=())
def in_memory(x: Tensor) -> Tensor:
    """Copy x, so that Inductor reads it and does not compute x anew for every pair."""
    return x.clone()


@in_memory.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


in_memory.register_autograd(lambda ctx, grad: grad)


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
        arguments = ctx.kind, grad, known, *inputs
        gradients = _GRADIENTS[: len(inputs)]
        kernels = (_kernel(gradient, ctx.kind, inputs[0]) for gradient in gradients)
        return None, *(kernel(*arguments) for kernel in kernels)


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


# One operation per kernel for plans, which count shapes on the meta device.
_LIBRARY = torch.library.Library("kge_torchrec", "FRAGMENT")
_LIBRARY.define("value_of_pairs(Tensor query, Tensor rows) -> Tensor")
_LIBRARY.define("gradient_of_pairs(Tensor grad, Tensor of) -> Tensor")
VALUE_OF_PAIRS = torch.ops.kge_torchrec.value_of_pairs
GRADIENT_OF_PAIRS = torch.ops.kge_torchrec.gradient_of_pairs


@torch.library.impl(_LIBRARY, "value_of_pairs", "Meta")
def _of_pairs(query: Tensor, rows: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:2], rows.shape[1])


@torch.library.impl(_LIBRARY, "gradient_of_pairs", "Meta")
def _like(grad: Tensor, of: Tensor) -> Tensor:
    return torch.empty_like(of)


def _planned(formula: Callable[..., Any], kind: Kind, *arguments: Tensor) -> Any:
    """Return the formula's results on the meta device, by the operations above."""
    if formula is not _value:
        grad, _, *inputs = arguments
        of = inputs[_GRADIENTS.index(formula)]
        return GRADIENT_OF_PAIRS(grad, of)
    value = VALUE_OF_PAIRS(*arguments[:2])
    return value, value if kind == "euclidean" else None


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


def _difference(query: Tensor, rows: Tensor, maps: Tensor | None) -> Tensor:
    """Return differences (C, b, K, D), which compiled code never has in memory."""
    points = rows[:, None] if maps is None else maps[:, :, None] * rows[:, None]
    return query[:, :, None] - points


def _gradient_of_query(
    kind: Kind,
    grad: Tensor,
    known: Tensor | None,
    query: Tensor,
    rows: Tensor,
    maps: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the queries, (C, b, D)."""
    return _summed(_Pairs(kind, grad, known), _difference(query, rows, maps), 2)


def _gradient_of_rows(
    kind: Kind,
    grad: Tensor,
    known: Tensor | None,
    query: Tensor,
    rows: Tensor,
    maps: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the rows, (C, K, D)."""
    # With the opposite sign: Inductor would keep differences that both gradients share.
    difference = -_difference(query, rows, maps)
    factor = None if maps is None else maps[:, :, None]
    return _summed(_Pairs(kind, grad, known), difference, 1, factor)


def _gradient_of_maps(
    kind: Kind, grad: Tensor, known: Tensor | None, query: Tensor, rows: Tensor, maps: Tensor
) -> Tensor:
    """Return the gradient of the maps, (C, b, D)."""
    difference = _difference(query, rows, maps)
    return _summed(_Pairs(kind, grad, known), -difference, 2, rows[:, None])


_GRADIENTS = _gradient_of_query, _gradient_of_rows, _gradient_of_maps


class _Pairs(NamedTuple):
    """The inputs of the gradients of all pairs, besides the differences."""

    kind: Kind
    grad: Tensor  # (C, b, K), of the distances
    known: Tensor | None  # (C, b, K), from ``_value``


def _summed(pairs: _Pairs, difference: Tensor, dim: int, factor: Tensor | None = None) -> Tensor:
    """Sum the gradients by the differences (C, b, K, D), times a factor if any, over b or K."""
    grad = pairs.grad
    if pairs.kind == "moduli":
        # Both parts share a value that is computed from four others, without the factor of grad.
        moduli = _moduli(difference)
        units = [difference[..., part::2] / moduli for part in (0, 1)]
        return torch.stack([(grad[..., None] * unit).sum(dim) for unit in units], -1).flatten(-2)
    gradients = _pair_gradients(pairs, difference)
    return (gradients if factor is None else gradients * factor).sum(dim)


def _pair_gradients(pairs: _Pairs, difference: Tensor) -> Tensor:
    kind, grad, known = pairs
    if kind in ("manhattan", "scaled_manhattan"):
        return grad[..., None] * difference.sign()
    if kind == "scaled_squares":
        return 2 * grad[..., None] * difference
    assert known is not None  # of "euclidean": 0 where rows are equal, as in torch.cdist
    return torch.where(known > 0, grad / known, 0)[..., None] * difference


def _moduli(difference: Tensor) -> Tensor:
    """Return the moduli of complex numbers: (..., D) -> (..., D/2)."""
    real, imaginary = difference[..., 0::2], difference[..., 1::2]
    return (real.square() + imaginary.square() + EPSILON).sqrt()
