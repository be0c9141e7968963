"""Row optimizers that are not ours, by torch operations: on rows of the table, on dense parameters.

Shapes: n rows of the table on this rank, M gradients, D numbers a row; R rows of a dense parameter
with W numbers each.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kge_torchrec.distributed.dense import local_part
from kge_torchrec.embeddings.optimizers import RowOptimizer, TableOptimizer


def step_rows(
    optimizer: TableOptimizer,
    lr: float,
    step: int,
    ids: Tensor,
    grad: Tensor,
    weights: Tensor,
    *states: Tensor,
) -> None:
    """One step of an optimizer that is not ours, on the rows that have a gradient.

    As ``row_updates.update_rows``: ids (M,) in any order, duplicates summed; grad (M, D); weights
    (n, D) and states, (n, D) or (n,), are written in place.
    """
    if not len(ids):
        return
    rows, inverse = torch.unique(ids, return_inverse=True)
    total = grad.new_zeros(len(rows), grad.shape[1]).index_add_(0, inverse, grad)
    held = [state.index_select(0, rows) for state in states]
    names = [name for name, _ in optimizer.kind.states]
    views = {name: x.view(len(rows), -1) for name, x in zip(names, held, strict=True)}
    moved = weights.index_select(0, rows)
    optimizer.rule.step(moved, total, views, lr, step)
    for whole, part in zip((weights, *states), (moved, *held), strict=True):
        whole.index_copy_(0, rows, part)


class DenseRows(torch.optim.Optimizer):
    """Steps parameters as tables: (R, W), or (R, 1) if they have one dimension.

    What a wrapper leaves of a parameter on this rank is whole rows, so that the ranks agree.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, rule: RowOptimizer):
        self._rule = rule
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """One step of every parameter that has a gradient."""
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
    """The same numbers as rows, to write into."""
    return tensor.view(len(tensor), -1) if tensor.dim() != 2 else tensor
