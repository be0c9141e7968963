"""Rows of a rank and their gradients, kept between backward and the step.

The table does not step inside backward.  All backward passes before a step form one sum, so
gradient accumulation, clipping and unscaling are exact.  Row optimizers from other packages step
the table and the dense parameters here; built-in ones have kernels.

``TableBlock`` holds the rows of all tables, one table after the other, and their gradients.

Shapes: n rows of the table on this rank, D elements per row, M gradients, U distinct rows among
them; R rows of a dense parameter with W elements each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kge_torchrec.distributed.dense import local_part
from kge_torchrec.embeddings.optimizers import RowOptimizer, TableOptimizer


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

    def split(self, parts: dict[str, range]) -> Iterator[tuple[str, RowGradients]]:
        """Yield the name of each part and the gradients of its rows, numbered from its start.

        Args:
            parts: All rows by name, one part after the other.
        """
        if len(parts) == 1:
            yield next(iter(parts)), self
            return
        stops = [part.stop for part in parts.values()][:-1]
        place = torch.bucketize(self.ids, torch.tensor(stops, device=self.ids.device), right=True)
        order, sizes = place.argsort(stable=True), place.bincount(minlength=len(parts)).tolist()
        counts = None if self.occurrences is None else self.occurrences[order].split(sizes)
        split = zip(parts, self.ids[order].split(sizes), self.grad[order].split(sizes), strict=True)
        for number, (name, ids, grad) in enumerate(split):
            own = None if counts is None else counts[number]
            yield name, RowGradients(ids - parts[name].start, grad, own, self.distinct)


class TableBlock:
    """This rank's rows of all tables, one table after the other, and their gradients.

    Args:
        rows: (n, D), the memory of the tables.
        first_row: Id of ``rows[0]``.
        parts: Rows of each table by its name, in order.

    Attributes:
        gradients: Those of each backward pass since the last step.
        frozen: (n,) bool or None.  Gradients of frozen rows are dropped, so no step changes these
            rows or their state.
        read: Returns rows (M,) -> (M, D), a copy.
    """

    def __init__(self, rows: Tensor, first_row: int, parts: dict[str, range]):
        self.rows, self.first_row, self.parts = rows, first_row, parts
        self.gradients: list[RowGradients] = []
        self.frozen: Tensor | None = None
        self.read: Callable[[Tensor], Tensor] = partial(rows.index_select, 0)
        self._taken: dict[str, RowGradients] = {}

    def __deepcopy__(self, memo: Any) -> TableBlock:
        return self  # TorchRec copies the settings of tables, and a block is one of them

    def rows_of(self, name: str) -> Tensor:
        """Return the rows of a table on this rank, a view."""
        part = self.parts[name]
        return self.rows[part.start : part.stop]

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up rows; backward adds their gradients.

        Nothing is recorded if gradients are disabled.

        Args:
            ids: (M,) in [0, n).

        Returns:
            (M, D), a copy.

        Raises:
            IndexError: An id is outside [0, n).  On CUDA this is a device-side assertion instead.
        """
        # Autograd calls our backward only if an input requires a gradient.
        return _RecordedLookup.apply(torch.empty(0, requires_grad=True), self, ids)

    def add(self, gradients: RowGradients) -> None:
        """Keep the gradients of one backward pass.  M may be 0."""
        if self.frozen is not None:
            gradients = gradients.without(self.frozen)
        self.gradients.append(gradients)

    def take(self, name: str | None = None) -> RowGradients | None:
        """Return and forget gradients; None without a backward since the last ones.

        Args:
            name: A table, whose rows are numbered from its start; None for all of them.
        """
        parts, self.gradients = self.gradients, []
        if len(parts) > 1:
            ids, grad, places, _ = zip(*parts, strict=True)
            every_place = None if places[0] is None else torch.cat(places)
            parts = [RowGradients(torch.cat(ids), torch.cat(grad), every_place, False)]
        gradients = parts[0] if parts else None
        if name is None or len(self.parts) == 1:
            return gradients
        if gradients is not None:
            self._taken = dict(gradients.split(self.parts))
        return self._taken.pop(name, None)

    @torch.no_grad()
    def sums(self) -> Tensor:
        """Sum the gradients of each row and return the sums, (U, D).

        The sums are divided by the row's occurrences if these are counted.  The next step uses the
        returned tensor, so changes to it (such as clipping) take effect.
        """
        gradients = self.take()
        if gradients is None:
            return torch.zeros(0, 0)
        rows, total, occurrences, distinct = gradients
        if not distinct:
            rows, total, inverse = _summed(rows, total)
            if occurrences is not None:
                zeros = torch.zeros_like(rows, dtype=occurrences.dtype)
                occurrences = zeros.index_add_(0, inverse, occurrences)
        elif occurrences is None:
            total = total.clone()  # autograd may share this memory
        if occurrences is not None:
            total = total / occurrences.unsqueeze(1)
        self.gradients = [RowGradients(rows, total, None, True)]
        return total


class _RecordedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, block: TableBlock, ids: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(ids)
        return block.read(ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.block.add(RowGradients(ids, grad))
        return None, None, None


def _summed(ids: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids (U,), the sums of their gradients (U, D) and each id's place (M,)."""
    rows, inverse = torch.unique(ids, return_inverse=True)
    return rows, grad.new_zeros(len(rows), grad.shape[1]).index_add_(0, inverse, grad), inverse


def step_rows(
    optimizer: TableOptimizer,
    lr: float,
    step: int,
    ids: Tensor,
    grad: Tensor,
    weights: Tensor,
    *states: Tensor,
) -> None:
    """Take one step of another package's optimizer on the rows that have a gradient.

    The torch counterpart of ``rows.update_rows``.

    Args:
        optimizer: The optimizer of the table.
        lr: Learning rate.
        step: Number of this step, from 1.
        ids: (M,) rows in any order; gradients of duplicates are summed.
        grad: (M, D).
        weights: (n, D), updated in place.
        states: (n, D) or (n,) each, updated in place.
    """
    if not len(ids):
        return
    rows, total, _ = _summed(ids, grad)
    held = [state.index_select(0, rows) for state in states]
    names = [name for name, _ in optimizer.kind.states]
    views = {name: x.view(len(rows), -1) for name, x in zip(names, held, strict=True)}
    moved = weights.index_select(0, rows)
    optimizer.rule.step(moved, total, views, lr, step)
    for whole, part in zip((weights, *states), (moved, *held), strict=True):
        whole.index_copy_(0, rows, part)


class DenseRows(torch.optim.Optimizer):
    """Apply a row optimizer to dense parameters, viewed as (R, W), or (R, 1) if one-dimensional.

    Dense wrappers shard parameters by whole rows, so all ranks get the same result.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, rule: RowOptimizer):
        self._rule = rule
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Take one step of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group["lr"])

    def _step(self, parameter: nn.Parameter, grad: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name, by_row in self._rule.states:
                of = parameter.detach()
                state[name] = torch.zeros_like(of[:, :1] if by_row and of.dim() > 1 else of)
        state["step"] += 1
        names = [name for name, _ in self._rule.states]
        parts = {name: _rows(local_part(state[name])) for name in names}
        rows, moves = _rows(local_part(parameter.detach())), _rows(local_part(grad))
        self._rule.step(rows, moves, parts, lr, int(state["step"]))


def _rows(tensor: Tensor) -> Tensor:
    """Return a two-dimensional view."""
    rows = torch.atleast_1d(tensor)
    return rows if rows.dim() == 2 else rows.view(len(rows), -1)
