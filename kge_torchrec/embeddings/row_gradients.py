"""Gradients of rows of a rank, and steps of row optimizers from other packages.

Built-in optimizers have kernels.

Shapes: n rows of the table on this rank, D elements per row, M gradients, U distinct rows among
them; R rows of a dense parameter with W elements each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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

    def without(self, frozen: Tensor) -> RowGradients:
        """Return the gradients of rows that are not frozen, (n,) bool."""
        kept = (~frozen[self.ids]).nonzero().squeeze(1)
        counts = None if self.occurrences is None else self.occurrences[kept]
        return RowGradients(self.ids[kept], self.grad[kept], counts, self.distinct)

    def split(self, parts: Sequence[range]) -> list[RowGradients]:
        """Return the gradients of the rows of each part, numbered from its start.

        Args:
            parts: All rows, one part after the other.
        """
        if len(parts) == 1:
            return [self]
        stops = torch.tensor([part.stop for part in parts[:-1]], device=self.ids.device)
        place = torch.bucketize(self.ids, stops, right=True)
        order, sizes = place.argsort(stable=True), place.bincount(minlength=len(parts)).tolist()
        counts: Sequence[Tensor | None] = [None] * len(parts)
        if self.occurrences is not None:
            counts = self.occurrences[order].split(sizes)
        ids, grad = self.ids[order].split(sizes), self.grad[order].split(sizes)
        return [
            RowGradients(own - part.start, total, count, self.distinct)
            for part, own, total, count in zip(parts, ids, grad, counts, strict=True)
        ]


def summed(ids: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    rows, total, _ = summed(ids, grad)
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
