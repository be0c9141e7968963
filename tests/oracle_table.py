"""The table optimizers as plain dense torch, in one process: what every other form must equal.

Written from the formulas, in float64 (except betas and their powers, which each system takes in its
own precision), with no code shared with the package.

Shapes: N rows, D elements per row, M gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")
PRESETS = [*(("fbgemm", name) for name in NAMES),
           ("dicee", "adam"), ("dgl", "adam"), ("dgl", "adagrad")]  # fmt: skip


def settings(name: str, **changes) -> dict:
    """Arguments of ``make_optimizer`` with nothing at its default value."""
    values = {"name": name, "lr": 0.05}
    if name != "sgd":
        values["eps"] = 1e-6
    if name.endswith("adam"):
        values |= {"beta1": 0.8, "beta2": 0.95}
    if name not in ("adagrad", "sgd"):
        values["weight_decay"] = 0.02
    return values | changes


class DenseTable:
    """``step`` takes the gradients of all ranks at once."""

    def __init__(self, values: Tensor, optimizer, preset: str = "fbgemm") -> None:
        self.optimizer, self.preset, self.lr = optimizer, preset, optimizer.lr
        self.weights = values.double().clone()
        rowwise = optimizer.name.startswith("rowwise")
        self.moment = torch.zeros_like(self.weights)
        self.squares = torch.zeros_like(self.weights[:, :1] if rowwise else self.weights)
        self.steps, self.row_steps = 0, torch.zeros(len(values), 1, dtype=torch.int64)

    def step(self, ids: Tensor, grad: Tensor, occurrences: Tensor | None = None) -> None:
        """One step with the gradients (M, D) of the rows (M,), sums over some occurrences."""
        self.steps += bool(len(ids)) or self.preset != "dicee"
        if not len(ids):
            return
        total = torch.zeros_like(self.weights).index_add_(0, ids, grad.double())
        touched = torch.zeros(len(self.weights), 1, dtype=torch.bool)
        touched[ids] = True
        self.row_steps += touched
        if self.preset == "dgl":
            places = torch.ones_like(ids) if occurrences is None else occurrences.long()
            total /= torch.zeros_like(self.row_steps[:, 0]).index_add_(0, ids, places)[:, None]
        before = self.weights, self.moment, self.squares
        after = zip(self._stepped(total), before, strict=True)
        self.weights, self.moment, self.squares = (torch.where(touched, *pair) for pair in after)

    def states(self) -> dict[str, Tensor]:
        """Under their names in a checkpoint."""
        squares = self.squares[:, 0] if self.optimizer.name.startswith("row") else self.squares
        if not self.optimizer.name.endswith("adam"):
            return {} if self.optimizer.name == "sgd" else {"momentum1": squares}
        states = {"momentum1": self.moment, "exp_avg_sq": squares}
        return states | ({"row_step": self.row_steps[:, 0]} if self.preset == "dgl" else {})

    def _stepped(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        name, weights, moment, squares = (
            self.optimizer.name, self.weights, self.moment, self.squares
        )  # fmt: skip
        if name == "sgd":
            return weights - self.lr * grad, moment, squares
        eps, decay = self.optimizer.eps, getattr(self.optimizer, "weight_decay", 0.0)
        decay = decay if self.preset == "fbgemm" else 0.0  # the others have none
        if name == "rowwise_adagrad":
            grad = grad + decay * weights
        square = grad.square()
        if name.startswith("rowwise"):
            square = square.mean(1, keepdim=True)
        if name.endswith("adagrad"):
            squares = squares + square
            root = (squares + eps).sqrt() if self.preset == "dgl" else squares.sqrt() + eps
            return weights - self.lr * grad / root, moment, squares
        beta1, correction1 = self._correction(self.optimizer.beta1)
        beta2, correction2 = self._correction(self.optimizer.beta2)
        moment = beta1 * moment + (1 - beta1) * grad
        squares = beta2 * squares + (1 - beta2) * square
        change = moment / correction1 / ((squares / correction2).sqrt() + eps)
        if self.preset == "dicee":
            change = correction2**0.5 / correction1 * moment / (squares.sqrt() + eps)
        return weights - self.lr * (change + decay * weights), moment, squares

    def _correction(self, beta: float) -> tuple:
        """(beta, 1 - beta^t) in the precision of the system that counts steps this way."""
        single = torch.tensor(beta, dtype=torch.float32)
        if self.preset == "fbgemm":
            return single.double(), 1 - single.pow(self.steps).double()
        if self.preset == "dicee":
            return beta, 1 - beta**self.steps
        return beta, 1 - (single.double() ** self.row_steps).float().double()
