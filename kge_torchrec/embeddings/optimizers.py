"""The optimizers of the entity table: one class each, with its states and properties.

Built-in optimizers run in a compiled kernel (``kernels.rows``) or in FBGEMM's.  Classes from other
packages implement ``step`` with torch operations, which also steps the dense parameters.

Shapes: u rows at a time, D elements per row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from kge_torchrec.config.checks import ConfigError, check, not_negative, positive
from kge_torchrec.config.keys import key
from kge_torchrec.config.registry import KINDS, construct_class, resolve

if TYPE_CHECKING:
    from torch import Tensor, nn

TABLE_OPTIMIZERS = tuple(KINDS["table_optimizer"].ours)


class State(NamedTuple):
    """An optimizer state tensor that is kept with the table."""

    name: str
    by_row: bool = False  # one element per row instead of one per element of the table


class RowOptimizer:
    """An optimizer of table rows.  Subclasses in other packages implement ``step``.

    The constructor takes the fields of ``Options`` by name.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of this optimizer: ``train.optimizer_options`` of the config."""

    states: tuple[State, ...] = ()  # initially zeros
    corrects_bias = False  # whether a step depends on the number of earlier steps
    weight_decay: str | None = None  # "decoupled" or "l2"; None: FBGEMM has none
    fbgemm: str | None = None  # member of FBGEMM's EmbOptimType, if FBGEMM has this optimizer
    by_row: str | None = None  # name of the variant that keeps less state, one element per row

    def step(
        self, rows: Tensor, grad: Tensor, states: dict[str, Tensor], lr: float, step: int
    ) -> None:
        """Update rows and states in place.

        Args:
            rows: (u, D), distinct rows.
            grad: (u, D), their gradients.
            states: By name, (u, D), or (u, 1) for states with one element per row.
            lr: Learning rate.
            step: Number of this step, from 1.
        """
        raise NotImplementedError

    @classmethod
    def state_numbers(cls) -> tuple[int, int]:
        """Return the state elements per element of the table, and per row."""
        by_row = sum(state.by_row for state in cls.states)
        return len(cls.states) - by_row, by_row

    @classmethod
    def saved_states(cls) -> list[State]:
        """Return the states with their names in a checkpoint, where the first is momentum1."""
        first = [state._replace(name="momentum1") for state in cls.states[:1]]
        return [*first, *cls.states[1:]]

    @classmethod
    def dense(cls, parameters: Iterable[nn.Parameter], lr: float, of: TableOptimizer) -> Any:
        """Return the torch optimizer of the dense parameters, or None to use ``step`` for them.

        Built-in optimizers use the variant without row-wise state.  With ``step``, the first
        dimension of a dense parameter is its rows.

        Args:
            parameters: The dense parameters.
            lr: Their learning rate.
            of: The table's optimizer, with betas, eps and weight decay.
        """
        return None


_WEIGHT_DECAY = "Weight decay of touched rows: decoupled for the Adams, L2 for rowwise_adagrad."


def _decay_rate(key: str, value: float) -> None:
    check(0 <= value < 1, key, "in [0, 1)", value)
    small = value < 1 - 2**-25  # what is not rounds to 1 in float32, where steps are taken
    check(small, key, "at most 0.99999994, the float32 before 1", value)


class SGD(RowOptimizer):
    """Gradient descent: w -= lr * g."""

    fbgemm = "EXACT_SGD"

    @classmethod
    def dense(cls, parameters: Iterable[nn.Parameter], lr: float, of: TableOptimizer) -> Any:
        return _torch().SGD(parameters, lr=lr, weight_decay=of.weight_decay)


class Adagrad(RowOptimizer):
    """Adagrad (Duchi et al. 2011): w -= lr * g / (sqrt(sum of g^2) + eps)."""

    @dataclass(frozen=True)
    class Options:
        """Settings of Adagrad."""

        eps: float = key(1e-8, "Epsilon, added outside the root.", check=positive)

    states = (State("sum"),)
    fbgemm = "EXACT_ADAGRAD"
    by_row: str | None = "rowwise_adagrad"

    @classmethod
    def dense(cls, parameters: Iterable[nn.Parameter], lr: float, of: TableOptimizer) -> Any:
        decay = of.weight_decay
        return _torch().Adagrad(parameters, lr=lr, eps=of.eps, weight_decay=decay)


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum per row: that of the mean square of the row's gradient."""

    @dataclass(frozen=True)
    class Options(Adagrad.Options):
        """Settings of row-wise Adagrad."""

        weight_decay: float = key(0.0, _WEIGHT_DECAY, check=not_negative)

    states = (State("sum", by_row=True),)
    weight_decay = "l2"
    fbgemm, by_row = "EXACT_ROWWISE_ADAGRAD", None


class Adam(RowOptimizer):
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019)."""

    @dataclass(frozen=True)
    class Options:
        """Settings of Adam."""

        beta1: float = key(0.9, "Decay rate of the first moment.", check=_decay_rate)
        beta2: float = key(0.999, "Decay rate of the second moment.", check=_decay_rate)
        eps: float = key(1e-8, "Epsilon, added outside the root.", check=positive)
        weight_decay: float = key(0.0, _WEIGHT_DECAY, check=not_negative)

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
    """Adam with one second moment per row: that of the mean square of the row's gradient."""

    states = (State("exp_avg"), State("exp_avg_sq", by_row=True))
    fbgemm, by_row = "PARTIAL_ROWWISE_ADAM", None


def _torch() -> Any:
    import torch  # imported late, so that reading a config does not load torch

    return torch.optim


def optimizer_class(name: str) -> type[RowOptimizer]:
    """Return the optimizer class of a name in the config.

    Raises:
        ConfigError: The name is unknown.
    """
    return resolve("table_optimizer", name)


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer of the entity table and its settings.  A step changes touched rows only.

    The Adam variants count steps for the whole table, not per row, and use decoupled weight decay.
    rowwise_adagrad adds the decay to the gradient (L2).  FBGEMM's adagrad and sgd have no weight
    decay.

    Raises:
        ConfigError: A class from another package does not implement ``step``.
    """

    name: str = "adam"
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    options: Any = None  # the Options of an optimizer from another package

    def __post_init__(self) -> None:
        if not self.is_ours and self.kind.step is RowOptimizer.step:
            raise ConfigError(f"train.optimizer: {self.name} has no step; give it one")

    @classmethod
    def of(cls, name: str, lr: float, options: Any) -> TableOptimizer:
        """Make an optimizer with its ``Options``."""
        if name not in TABLE_OPTIMIZERS:
            return cls(name, lr, options=options)
        values = asdict(options)
        betas = values.pop("beta1", cls.betas[0]), values.pop("beta2", cls.betas[1])
        return cls(name, lr, betas, **values)

    @cached_property
    def kind(self) -> type[RowOptimizer]:
        """The class of the optimizer."""
        return optimizer_class(self.name)

    @property
    def is_ours(self) -> bool:
        """Whether the optimizer is built in, with a compiled kernel."""
        return self.name in TABLE_OPTIMIZERS

    @cached_property
    def rule(self) -> RowOptimizer:
        """An instance of the class, made with ``options``, for optimizers of other packages."""
        options = {} if self.options is None else asdict(self.options)
        return construct_class("table_optimizer", self.kind, **options)
