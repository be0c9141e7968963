"""Gradients of rows on a rank, and the steps that row optimizers take with them.

Shapes: n rows of the table on this rank, D elements per row, M gradients, U distinct rows among
them, u rows at a time; R rows of a dense parameter with W elements each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kge_torchrec.distributed.dense import local_part
from kge_torchrec.embeddings.init import zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import KERNELS, RowOptimizer
from kge_torchrec.kernels.rows import update_rows

# On a CPU the temporaries of a chunk should fit in the cache; on a GPU they only need to be small.
_CHUNK_ROWS = {"cpu": 512, "cuda": 1 << 16}


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

    def summed(self) -> RowGradients:
        """Return one gradient (U, D) per row: the sum, or the mean over its occurrences if counted.

        On a CPU, gradients are added in their order.
        """
        rows, total, occurrences, distinct = self
        if not distinct:
            rows, inverse = torch.unique(rows, return_inverse=True)
            zeros = torch.zeros(len(rows), total.shape[1], device=total.device)
            total = zeros.index_add_(0, inverse, total.float())
            if occurrences is not None:
                occurrences = torch.zeros_like(rows).index_add_(0, inverse, occurrences.long())
        if occurrences is not None:
            total = total / occurrences.unsqueeze(1)
        return RowGradients(rows, total, None, True)


class TableRows:
    """This rank's rows of a table, with an optimizer that steps only rows that have a gradient.

    Args:
        optimizer: The optimizer of the table.
        rows: (n, D) float32, the memory of the table, which steps change; n may be 0.

    Attributes:
        lr: Learning rate of the next step, initially the optimizer's.
        steps: Number of steps so far.  Set it to resume.
        states: Tensors to save with the table, by FBGEMM's names, initially zeros: (n, D), or (n,)
            for states with one element per row.  Write into them to resume.
        kernel: The kernel of ``kernels.rows`` that takes the steps; None for the optimizer's own
            ``step``, which is the same formula in torch.
        chunk_rows: Rows at a time without a kernel.  Results do not depend on it.
    """

    def __init__(self, optimizer: RowOptimizer, rows: Tensor) -> None:
        self.optimizer, self.rows = optimizer, rows.detach()
        self.lr, self.steps = optimizer.lr, 0
        self.device = torch.device("cpu") if optimizer.in_background else rows.device
        self.states = {
            name: zeros_on_huge_pages(
                *rows.shape[: 1 if state.by_row else 2],
                dtype=getattr(torch, state.dtype),
                device=self.device,
            )
            for name, state in zip(optimizer.saved_names(), optimizer.states, strict=True)
        }
        self.kernel = KERNELS.get(type(optimizer)) if rows.device.type == "cpu" else None
        self.chunk_rows = _CHUNK_ROWS[self.device.type]

    def count(self, has_rows: bool) -> None:
        """Count one step, unless the optimizer counts only steps in which there are rows."""
        self.steps += has_rows or self.optimizer.counts_empty_steps

    @torch.no_grad()
    def step_part(self, part: RowGradients) -> None:
        """Take a part of the step that was counted last.  Rows without a gradient do not change.

        The parts of a step have no row in common.
        """
        if not len(part.ids):
            return
        if part.occurrences is not None:
            part = part.summed()
        if self.kernel is not None:
            options, states = vars(self.optimizer), self.states.values()
            count = self.lr, self.steps
            grad = part.grad.float()
            update_rows(self.kernel, options, *count, part.ids, grad, self.rows, *states)
            return
        ids, grad, _, _ = part.summed()
        for start in range(0, len(ids), self.chunk_rows):
            self._step(*(x[start : start + self.chunk_rows] for x in (ids, grad)))

    def _step(self, ids: Tensor, grad: Tensor) -> None:
        """Update distinct rows (u,) with their gradients (u, D)."""
        places = ids.to(self.device)
        rows = self.rows.index_select(0, ids).to(self.device)
        states = {}
        for state, whole in zip(self.optimizer.states, self.states.values(), strict=True):
            part = whole.index_select(0, places).view(len(ids), -1)
            states[state.name] = part.float() if part.is_floating_point() else part
        self.optimizer.step(rows, grad.float().to(self.device), states, self.lr, self.steps)
        self.rows.index_copy_(0, ids, rows.to(self.rows.device))
        for whole, part in zip(self.states.values(), states.values(), strict=True):
            whole.index_copy_(0, places, part.to(whole.dtype).view(-1, *whole.shape[1:]))


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
            for name, by_row, _ in self._rule.states:
                of = parameter.detach()
                state[name] = torch.zeros_like(of[:, :1] if by_row and of.dim() > 1 else of)
        state["step"] += 1
        parts = {own.name: _rows(local_part(state[own.name])) for own in self._rule.states}
        rows, moves = _rows(local_part(parameter.detach())), _rows(local_part(grad))
        self._rule.step(rows, moves, parts, lr, int(state["step"]))


def _rows(tensor: Tensor) -> Tensor:
    """Return a two-dimensional view."""
    rows = torch.atleast_1d(tensor)
    return rows if rows.dim() == 2 else rows.view(len(rows), -1)
