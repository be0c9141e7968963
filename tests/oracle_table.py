"""The table optimizers as plain dense torch, in one process: what every other form must equal.

Written from the formulas, in float64 (except Adam's betas and their powers, which FBGEMM takes in
float32), with no code shared with the package.

Shapes: N rows, D elements per row, M gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")


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

    def __init__(self, values: Tensor, optimizer, inside: bool = False) -> None:
        self.optimizer, self.inside = optimizer, inside  # inside: epsilon, in Adagrad's root
        self.lr = optimizer.lr
        self.weights = values.double().clone()
        rows, dim = values.shape
        rowwise = optimizer.name.startswith("rowwise")
        self.moment = torch.zeros(rows, dim, dtype=torch.float64)
        self.squares = torch.zeros(rows, 1 if rowwise else dim, dtype=torch.float64)
        self.steps = 0

    def step(self, ids: Tensor, grad: Tensor) -> None:
        """One step with the gradients (M, D) of the rows (M,); rows without one stay."""
        self.steps += 1
        total = torch.zeros_like(self.weights).index_add_(0, ids, grad.double())
        touched = torch.zeros(len(self.weights), 1, dtype=torch.bool)
        touched[ids] = True
        weights, moment, squares = self._stepped(total)
        self.weights = torch.where(touched, weights, self.weights)
        self.moment = torch.where(touched, moment, self.moment)
        self.squares = torch.where(touched, squares, self.squares)

    def states(self) -> dict[str, Tensor]:
        """Under the names that TorchRec's fused optimizer gives them."""
        squares = self.squares
        if self.optimizer.name.startswith("rowwise"):
            squares = squares[:, 0]
        if self.optimizer.name.endswith("adam"):
            return {"entity.momentum1": self.moment, "entity.exp_avg_sq": squares}
        return {} if self.optimizer.name == "sgd" else {"entity.momentum1": squares}

    def _stepped(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        name, decay = self.optimizer.name, getattr(self.optimizer, "weight_decay", 0.0)
        weights, moment, squares = self.weights, self.moment, self.squares
        if name == "sgd":
            return weights - self.lr * grad, moment, squares
        if name == "rowwise_adagrad":
            grad = grad + decay * weights
        square = grad.square()
        if name.startswith("rowwise"):
            square = square.mean(1, keepdim=True)
        if name.endswith("adagrad"):
            squares = squares + square
            eps = self.optimizer.eps
            root = (squares + eps).sqrt() if self.inside else squares.sqrt() + eps
            change = grad / root
            return weights - self.lr * change, moment, squares
        betas = self.optimizer.beta1, self.optimizer.beta2
        beta1, beta2 = (torch.tensor(beta, dtype=torch.float32) for beta in betas)
        moment = beta1.double() * moment + (1 - beta1.double()) * grad
        squares = beta2.double() * squares + (1 - beta2.double()) * square
        correction1, correction2 = (1 - beta.pow(self.steps).double() for beta in (beta1, beta2))
        denominator = (squares / correction2).sqrt() + self.optimizer.eps
        change = moment / correction1 / denominator + decay * weights
        return weights - self.lr * change, moment, squares
