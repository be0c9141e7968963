"""The optimizers of the entity table: one class for each says what everybody asks about it.

Ours have a compiled kernel (``row_updates``) and one of FBGEMM's.  Any other class gives its step
on some rows at a time by torch operations, and is applied to the relations in the same way.

Shapes: u rows at a time, D numbers a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.config.registry import KINDS, names_of, resolve

if TYPE_CHECKING:
    from torch import Tensor, nn

TABLE_OPTIMIZERS = tuple(KINDS["table_optimizer"].ours)


class State(NamedTuple):
    """A state that is kept with the table."""

    name: str
    by_row: bool = False  # one number per row, rather than one per number of the table


class RowOptimizer:
    """What steps the rows that have a gradient.  Subclasses of other packages give ``step``.

    Constructed with its ``Options`` by name.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings that this optimizer has besides: ``train.optimizer_options`` of the config."""

    states: tuple[State, ...] = ()  # zeros at first
    corrects_bias = False  # whether its step depends on the number of steps so far
    weight_decay: str | None = None  # "decoupled" or "l2", where train.weight_decay means one
    fbgemm: str | None = None  # member of FBGEMM's EmbOptimType, if it has such a kernel
    by_row: str | None = None  # the optimizer that differs from this one by keeping less state

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        """Moves distinct rows (u, D) with the gradients (u, D); writes into rows and states.

        states: by name, (u, D), or (u, 1) where they have one number per row.  step: its number,
        from 1.
        """
        raise NotImplementedError

    @classmethod
    def state_numbers(cls) -> tuple[int, int]:
        """Numbers of state for each number of the table, and for each row."""
        by_row = sum(state.by_row for state in cls.states)
        return len(cls.states) - by_row, by_row

    @classmethod
    def dense(cls, parameters: Iterable[nn.Parameter], lr: float, of: TableOptimizer) -> Any:
        """The torch optimizer of the dense parameters that goes with this one of the table.

        Ours take the form without state by row.  None, as here: dense parameters take ``step``,
        their first dimension being rows.
        """
        return None


class SGD(RowOptimizer):
    """w -= lr g"""

    fbgemm = "EXACT_SGD"

    @classmethod
    def dense(cls, parameters: Iterable[nn.Parameter], lr: float, of: TableOptimizer) -> Any:
        return _torch().SGD(parameters, lr=lr, weight_decay=of.weight_decay)


class Adagrad(RowOptimizer):
    """Duchi et al. 2011, of the sum of squares, eps outside the root."""

    states = (State("sum"),)
    fbgemm = "EXACT_ADAGRAD"
    by_row: str | None = "rowwise_adagrad"

    @classmethod
    def dense(cls, parameters: Iterable[nn.Parameter], lr: float, of: TableOptimizer) -> Any:
        decay = of.weight_decay
        return _torch().Adagrad(parameters, lr=lr, eps=of.eps, weight_decay=decay)


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum per row, of the mean square of its gradient."""

    states = (State("sum", by_row=True),)
    weight_decay = "l2"
    fbgemm, by_row = "EXACT_ROWWISE_ADAGRAD", None


class Adam(RowOptimizer):
    """Kingma and Ba 2015, decoupled weight decay (Loshchilov and Hutter 2019)."""

    states = (State("exp_avg"), State("exp_avg_sq"))
    corrects_bias, weight_decay = True, "decoupled"
    fbgemm = "ADAM"
    by_row: str | None = "rowwise_adam"

    @classmethod
    def dense(cls, parameters: Iterable[nn.Parameter], lr: float, of: TableOptimizer) -> Any:
        decay = of.weight_decay
        return _torch().AdamW(
            parameters, lr=lr, betas=of.betas, eps=of.eps, weight_decay=decay, fused=True
        )


class RowwiseAdam(Adam):
    """Adam with one second moment per row, of the mean square of its gradient."""

    states = (State("exp_avg"), State("exp_avg_sq", by_row=True))
    fbgemm, by_row = "PARTIAL_ROWWISE_ADAM", None


def _torch() -> Any:
    import torch  # a config is read without it where it needs no more than names

    return torch.optim


def optimizer_class(name: str) -> type[RowOptimizer]:
    """The class of a name in the config.  Raises ConfigError for a name that there is not."""
    return resolve("table_optimizer", name)


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer of the entity table; it steps on touched rows only.

    The Adams count steps for the whole table, not per row, and decay weights decoupled from the
    gradient; rowwise_adagrad adds the decay to the gradient (L2).  FBGEMM's adagrad and sgd have
    no weight decay.

    Raises ValueError, naming the field, for a value that makes no sense.
    """

    name: str = "adam"
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    options: Any = None  # of an optimizer that is not ours

    def __post_init__(self) -> None:
        if ":" not in self.name and self.name not in names_of("table_optimizer"):
            raise ValueError(f"name: {self.name!r} is none of {', '.join(TABLE_OPTIMIZERS)}")
        if not self.is_ours and self.kind.step is RowOptimizer.step:
            raise ConfigError(f"train.optimizer: {self.name} has no step; give it one")
        for field in ("lr", "eps", "weight_decay"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field}: {value} is not a finite number >= 0")
        object.__setattr__(self, "betas", tuple(self.betas))  # YAML gives lists
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas} are not two numbers in [0, 1)")
        if not all(np.float32(beta) < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas} round to 1 in float32, which kernels compute in")
        if self.weight_decay and self.kind.weight_decay is None:
            raise ValueError(
                f"weight_decay: FBGEMM's {self.name} has none; use adam, rowwise_adam or "
                "rowwise_adagrad, or a regularizer in the loss"
            )

    @cached_property
    def kind(self) -> type[RowOptimizer]:
        """What there is to know of it but for its numbers."""
        return optimizer_class(self.name)

    @property
    def is_ours(self) -> bool:
        """Whether there is a compiled kernel for it."""
        return self.name in TABLE_OPTIMIZERS

    @cached_property
    def rule(self) -> RowOptimizer:
        """The step of one that is not ours."""
        return self.kind(**(asdict(self.options) if self.options is not None else {}))
