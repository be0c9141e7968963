"""Gradients of table rows, kept between backward and the optimizer's step.

The table does not step inside backward.  All backward passes before a step form one sum, so
gradient accumulation, clipping and unscaling are exact.

Shapes: n rows on this rank, D elements per row, M gradients, U distinct rows among them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowGradients(NamedTuple):
    """Gradients of rows of this rank.  A row may have several."""

    ids: Tensor  # (M,) rows of this shard
    grad: Tensor  # (M, D)
    occurrences: Tensor | None = None  # (M,) batch positions that each gradient is the sum of
    distinct: bool = False  # whether every id occurs only once

    def without(self, frozen: Tensor | None) -> RowGradients:
        """Return the gradients of rows that are not frozen.

        Args:
            frozen: (n,) bool; None freezes nothing.
        """
        if frozen is None:
            return self
        kept = (~frozen[self.ids]).nonzero().squeeze(1)
        counts = None if self.occurrences is None else self.occurrences[kept]
        return RowGradients(self.ids[kept], self.grad[kept], counts, self.distinct)


class PendingGradients:
    """Table gradients for the next step.  True in a boolean context after any backward.

    Attributes:
        frozen: (n,) bool or None.  Gradients of frozen rows are dropped, so no step changes these
            rows or their state.
    """

    def __init__(self) -> None:
        self._parts: list[RowGradients] = []
        self.frozen: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, gradients: RowGradients) -> None:
        """Keep the gradients of one backward pass.  M may be 0."""
        self._parts.append(gradients.without(self.frozen))

    def clear(self) -> None:
        """Drop all gradients."""
        self._parts.clear()

    def take(self) -> RowGradients:
        """Return all gradients and clear them.  There must have been a backward."""
        joined = _joined(self._parts)
        self._parts = []
        return joined

    @torch.no_grad()
    def sums(self) -> Tensor:
        """Sum the gradients of each row and return the sums, (U, D).

        The sums are divided by the row's occurrences if these are counted.  The next step uses the
        returned tensor, so changes to it (such as clipping) take effect.
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
            total = grad.clone()  # autograd may share this memory
        if occurrences is not None:
            total = total / occurrences.unsqueeze(1)
        self._parts = [RowGradients(rows, total, None, True)]
        return total


def recorded_lookup(rows: Tensor, ids: Tensor, pending: PendingGradients) -> Tensor:
    """Look up rows; backward adds their gradients to ``pending``.

    Nothing is recorded if gradients are disabled.

    Args:
        rows: (n, D).
        ids: (M,) in [0, n).
        pending: Receives the gradients.

    Returns:
        (M, D), a copy.

    Raises:
        IndexError: An id is outside [0, n).  On CUDA this is a device-side assertion instead.
    """
    if not torch.is_grad_enabled():
        return rows.index_select(0, ids)
    # Autograd calls our backward only if an input requires a gradient.
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
