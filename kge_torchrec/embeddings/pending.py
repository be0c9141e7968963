"""Gradients of table rows, kept between backward and the optimizer's step.

A table that steps only when its optimizer does can be accumulated, clipped and unscaled exactly:
all backward passes before a step are one sum.

Shapes: n rows on this rank, D numbers a row, M gradients, U distinct rows among them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowGradients(NamedTuple):
    """Gradients that reached this rank; a row may have several."""

    ids: Tensor  # (M,) rows of this shard
    grad: Tensor  # (M, D)
    occurrences: Tensor | None = None  # (M,) places of a batch that each gradient is the sum of
    distinct: bool = False  # no id occurs twice

    def without(self, frozen: Tensor | None) -> RowGradients:
        """Those of rows that are not frozen, (n,) bool; None freezes nothing."""
        if frozen is None:
            return self
        kept = (~frozen[self.ids]).nonzero().squeeze(1)
        of_places = None if self.occurrences is None else self.occurrences[kept]
        return RowGradients(self.ids[kept], self.grad[kept], of_places, self.distinct)


class PendingGradients:
    """What backward has left for the next step.  Truth: whether there was a backward at all.

    frozen: (n,) bool, rows whose gradients are dropped, so that no step moves them or their state.
    """

    def __init__(self) -> None:
        self._parts: list[RowGradients] = []
        self.frozen: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, gradients: RowGradients) -> None:
        """Keeps the gradients of one backward pass; M may be 0."""
        self._parts.append(gradients.without(self.frozen))

    def clear(self) -> None:
        """Forgets all of them."""
        self._parts.clear()

    def take(self) -> RowGradients:
        """All of them, for the step; none are left.  There must be some."""
        joined = _joined(self._parts)
        self._parts = []
        return joined

    @torch.no_grad()
    def sums(self) -> Tensor:
        """(U, D) one gradient a row, as the step will take it; what is written here, it takes.

        The sum over a row's gradients, divided by their occurrences where those are counted.
        """
        if not self._parts:
            return torch.zeros(0, 0)
        ids, grad, occurrences, distinct = _joined(self._parts)
        rows, total = ids, grad
        if not distinct:
            rows, inverse = torch.unique(ids, return_inverse=True)
            total = grad.new_zeros(len(rows), grad.shape[1]).index_add_(0, inverse, grad)
            if occurrences is not None:
                zeros = torch.zeros_like(rows, dtype=occurrences.dtype)
                occurrences = zeros.index_add_(0, inverse, occurrences)
        elif occurrences is None:
            total = grad.clone()  # autograd may hold the same memory
        if occurrences is not None:
            total = total / occurrences.unsqueeze(1)
        self._parts = [RowGradients(rows, total, None, True)]
        return total


def recorded_lookup(rows: Tensor, ids: Tensor, pending: PendingGradients) -> Tensor:
    """(M, D) copies of rows (n, D) at ids (M,), whose gradients backward adds to ``pending``.

    Nothing is recorded where gradients are switched off.  Raises IndexError on an id outside
    [0, n); on CUDA the device stops instead.
    """
    if not torch.is_grad_enabled():
        return rows.index_select(0, ids)
    # something that needs a gradient, or autograd would not call our backward
    return _RecordedLookup.apply(torch.empty(0, requires_grad=True), rows, ids, pending)


class _RecordedLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, rows: Tensor, ids: Tensor, pending: PendingGradients
    ) -> Tensor:
        ctx.pending = pending
        ctx.save_for_backward(ids)
        return rows.index_select(0, ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.pending.add(RowGradients(ids, grad))
        return None, None, None, None


def _joined(parts: list[RowGradients]) -> RowGradients:
    if len(parts) == 1:
        return parts[0]
    ids, grad, places, _ = zip(*parts, strict=True)
    every_place = None if places[0] is None else torch.cat(places)
    return RowGradients(torch.cat(ids), torch.cat(grad), every_place, False)
