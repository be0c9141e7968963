"""The optimizers of the entity table: one class each, with its options, states and formula.

``step`` is the formula in torch.  It steps the rows of GPUs in the hand-rolled engine and checks
the compiled kernels of CPUs (``kernels.rows``) and of FBGEMM.

Shapes: u rows at a time, D elements per row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from kge_torchrec.config.checks import ConfigError, NonNegativeFloat, PositiveFloat, check
from kge_torchrec.config.registry import construct, resolve

if TYPE_CHECKING:
    from torch import Tensor, nn


class State(NamedTuple):
    """An optimizer state tensor that is kept with the table."""

    name: str
    by_row: bool = False  # one element per row instead of one per element of the table
    dtype: str = "float32"  # how the state is kept; ``step`` gets floats as float32


class RowOptimizer:
    """An optimizer of table rows.  Subclasses implement ``step``.

    The constructor takes the fields of ``Options`` by name and keeps them as attributes.

    Attributes:
        name: The name in the config.
        lr: The base learning rate of the table.
    """

    name = ""
    lr = 0.01

    @dataclass(frozen=True)
    class Options:
        """Settings of this optimizer: ``train.optimizer_options`` of the config."""

    states: tuple[State, ...] = ()  # initially zeros
    fbgemm: str | None = None  # member of FBGEMM's EmbOptimType, if FBGEMM has this optimizer
    by_row: str | None = None  # name of the variant that keeps less state, one element per row
    counts_empty_steps = True  # whether a step without gradients on a rank counts there
    in_background = False  # whether states are in main memory, and a thread takes the steps

    def __init__(self, **options: Any) -> None:
        vars(self).update(vars(self.Options(**options)))

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        """Update rows and states in place.

        Args:
            rows: (u, D) float32, distinct rows.
            grad: (u, D) float32, their gradients, to be left as they are.
            states: By name, (u, D), or (u, 1) for states with one element per row.
            lr: Learning rate.
            step: Number of this step, from 1.
        """
        raise NotImplementedError

    def dense(self, parameters: Iterable[nn.Parameter], lr: float) -> Any:
        """Return the torch optimizer of the dense parameters, or None to use ``step`` for them.

        Built-in optimizers use the variant without row-wise state.  With ``step``, the first
        dimension of a dense parameter is its rows.

        Args:
            parameters: The dense parameters.
            lr: Their learning rate.
        """
        return None

    @classmethod
    def state_numbers(cls) -> tuple[int, int]:
        """Return the state elements per element of the table, and per row."""
        by_row = sum(state.by_row for state in cls.states)
        return len(cls.states) - by_row, by_row

    @classmethod
    def saved_names(cls) -> list[str]:
        """Return the names of the states in a checkpoint, where the first is momentum1."""
        return ["momentum1", *(state.name for state in cls.states[1:])][: len(cls.states)]


def _decay_rate(key: str, value: float) -> None:
    check(0 <= value < 1, key, "in [0, 1)", value)
    small = value < 1 - 2**-25  # what is not rounds to 1 in float32, where steps are taken
    check(small, key, "at most 0.99999994, the float32 before 1", value)


class SGD(RowOptimizer):
    """Gradient descent: w -= lr g."""

    fbgemm = "EXACT_SGD"

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        rows.sub_(grad * lr)

    def dense(self, parameters: Iterable[nn.Parameter], lr: float) -> Any:
        return _torch().SGD(parameters, lr=lr)


class Adagrad(RowOptimizer):
    """Adagrad (Duchi et al. 2011): s += g^2; w -= lr g / (sqrt(s) + eps)."""

    @dataclass(frozen=True)
    class Options:
        """Settings of Adagrad."""

        eps: PositiveFloat = 1e-8
        """Epsilon, added outside the root."""

    eps: float
    states = (State("sum"),)
    fbgemm = "EXACT_ADAGRAD"
    by_row: str | None = "rowwise_adagrad"

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        total = states["sum"].add_(grad.square())
        rows.sub_((grad / total.sqrt().add_(self.eps)).mul_(lr))

    def dense(self, parameters: Iterable[nn.Parameter], lr: float) -> Any:
        return _torch().Adagrad(parameters, lr=lr, eps=self.eps)


class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one sum per row: g += wd w; s += mean(g^2); w -= lr g / (sqrt(s) + eps)."""

    @dataclass(frozen=True)
    class Options(Adagrad.Options):
        """Settings of row-wise Adagrad."""

        weight_decay: NonNegativeFloat = 0.0
        """Weight decay of touched rows: decoupled for the Adams, L2 for rowwise_adagrad."""

    eps: float
    weight_decay: float
    states = (State("sum", by_row=True),)
    fbgemm = "EXACT_ROWWISE_ADAGRAD"

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        if self.weight_decay:
            grad = grad + rows * self.weight_decay
        total = states["sum"].add_(grad.square().mean(1, keepdim=True))
        rows.sub_((grad / total.sqrt().add_(self.eps)).mul_(lr))

    def dense(self, parameters: Iterable[nn.Parameter], lr: float) -> Any:
        return _torch().Adagrad(parameters, lr=lr, eps=self.eps, weight_decay=self.weight_decay)


class Adam(RowOptimizer):
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019).

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    w -= lr (m / c1 / (sqrt(v / c2) + eps) + wd w), with ci = 1 - bi^t

    t counts the steps of the table.  Betas and their powers are float32, as in FBGEMM.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of Adam."""

        beta1: Annotated[float, _decay_rate] = 0.9
        """Decay rate of the first moment."""
        beta2: Annotated[float, _decay_rate] = 0.999
        """Decay rate of the second moment."""
        eps: PositiveFloat = 1e-8
        """Epsilon, added outside the root."""
        weight_decay: NonNegativeFloat = 0.0
        """Weight decay of touched rows: decoupled for the Adams, L2 for rowwise_adagrad."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    states: tuple[State, ...] = (State("exp_avg"), State("exp_avg_sq"))
    fbgemm = "ADAM"
    by_row: str | None = "rowwise_adam"

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        beta1, beta2 = _single(self.beta1), _single(self.beta2)
        m = states["exp_avg"].mul_(beta1).add_(grad * (1 - beta1))
        v = states["exp_avg_sq"].mul_(beta2).add_(self.square(grad).mul_(1 - beta2))
        correction1, correction2 = 1 - _single(beta1, step), 1 - _single(beta2, step)
        change = (m / correction1).div_((v / correction2).sqrt_().add_(self.eps))
        if self.weight_decay:
            change += rows * self.weight_decay
        rows.sub_(change.mul_(lr))

    def square(self, grad: Tensor) -> Tensor:
        """Return what the second moment is the mean of."""
        return grad.square()

    def dense(self, parameters: Iterable[nn.Parameter], lr: float) -> Any:
        betas, decay = (self.beta1, self.beta2), self.weight_decay
        return _torch().AdamW(
            parameters, lr=lr, betas=betas, eps=self.eps, weight_decay=decay, fused=True
        )


class RowwiseAdam(Adam):
    """Adam with one second moment per row: that of the mean square of the row's gradient."""

    states = (State("exp_avg"), State("exp_avg_sq", by_row=True))
    fbgemm, by_row = "PARTIAL_ROWWISE_ADAM", None

    def square(self, grad: Tensor) -> Tensor:
        return grad.square().mean(1, keepdim=True)


# Variants for ``entities.preset``: the table optimizers of two other systems.
#
#     dicee   dice-embeddings' sparse Adam: each shard counts the steps in which it had gradients,
#             epsilon is added before the bias of the second moment is corrected (as torch's
#             SparseAdam does), moments are bfloat16 in main memory, and a thread takes the steps
#     dgl     DGL's distributed SparseAdam and SparseAdagrad: the mean over duplicates (gradients
#             arrive with their occurrences), a step count per row, epsilon inside Adagrad's root
#
# Each counts steps with the arithmetic of its system: dicee takes betas and their powers in
# float64, dgl betas in float64 and their powers in float32.


class DiceeAdam(Adam):
    """w -= lr sqrt(c2) / c1 m / (sqrt(v) + eps)."""

    states = (State("exp_avg", dtype="bfloat16"), State("exp_avg_sq", dtype="bfloat16"))
    counts_empty_steps, in_background = False, True

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        m, v = _moments(self, grad, states)
        size = (1 - self.beta2**step) ** 0.5 / (1 - self.beta1**step)
        rows.sub_((m / v.sqrt().add_(self.eps)).mul_(size).mul_(lr))


class DglAdam(Adam):
    """w -= lr m / c1 / (sqrt(v / c2) + eps), with the number of steps of the row."""

    states = (*Adam.states, State("row_step", by_row=True, dtype="int32"))

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        m, v = _moments(self, grad, states)
        # torch computes the end of a tensor with a different routine, and float32 powers of the
        # two differ in the last bit.  Powers in float64, then rounded, are the same.
        steps = states["row_step"].add_(1).double()
        correction1, correction2 = (
            1 - (_single(beta) ** steps).float() for beta in (self.beta1, self.beta2)
        )
        rows.sub_((m / correction1).div_((v / correction2).sqrt_().add_(self.eps)).mul_(lr))


class DglAdagrad(Adagrad):
    """s += g^2; w -= lr g / sqrt(s + eps)."""

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        total = states["sum"].add_(grad.square())
        rows.sub_((grad / (total + self.eps).sqrt_()).mul_(lr))


def _moments(optimizer: Adam, grad: Tensor, states: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Update Adam's moments and return them."""
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    m = states["exp_avg"].mul_(beta1).add_(grad * (1 - beta1))
    return m, states["exp_avg_sq"].mul_(beta2).add_(grad.square().mul_(1 - beta2))


_VARIANTS: dict[tuple[str, type[RowOptimizer]], type[RowOptimizer]] = {
    ("dicee", Adam): DiceeAdam,
    ("dgl", Adam): DglAdam,
    ("dgl", Adagrad): DglAdagrad,
}


# The kernels of ``kernels.rows``.  A subclass has a step of its own, so it has no kernel.
KERNELS: dict[type[RowOptimizer], str] = {
    Adam: "adam",
    RowwiseAdam: "rowwise_adam",
    Adagrad: "adagrad",
    RowwiseAdagrad: "rowwise_adagrad",
    SGD: "sgd",
}


def _single(number: float, exponent: int = 1) -> float:
    """Round a number to float32, and raise it to a power in float32."""
    import numpy as np

    return float(np.power(np.float32(number), np.float32(exponent)))


def _torch() -> Any:
    import torch  # imported late, so that reading a config does not load torch

    return torch.optim


def optimizer_class(name: str) -> type[RowOptimizer]:
    """Return the optimizer class of a name in the config; ConfigError for an unknown one."""
    return resolve("table_optimizer", name)


def make_optimizer(
    name: str, lr: float = 0.01, preset: str = "fbgemm", **options: Any
) -> RowOptimizer:
    """Make the optimizer of a table by its name in the config, with the fields of its ``Options``.

    Raises:
        ConfigError: The name is unknown, or the class does not implement ``step``.
    """
    kind = optimizer_class(name)
    if preset != "fbgemm":
        kind = _VARIANTS[preset, kind]
    if kind.step is RowOptimizer.step:
        raise ConfigError(f"train.optimizer: {name} has no step; give it one")
    made: RowOptimizer = construct("table_optimizer", kind, **options)
    made.name, made.lr = name, lr
    return made
