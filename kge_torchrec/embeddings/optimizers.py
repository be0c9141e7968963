"""Which optimizer steps the entity table; every engine is told in this form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

TABLE_OPTIMIZERS = ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")


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

    def __post_init__(self) -> None:
        if self.name not in TABLE_OPTIMIZERS:
            raise ValueError(f"name: {self.name!r} is none of {', '.join(TABLE_OPTIMIZERS)}")
        for field in ("lr", "eps", "weight_decay"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field}: {value} is not a finite number >= 0")
        object.__setattr__(self, "betas", tuple(self.betas))  # YAML gives lists
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas} are not two numbers in [0, 1)")
        if not all(np.float32(beta) < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas} round to 1 in float32, which kernels compute in")
        if self.weight_decay and self.name in ("adagrad", "sgd"):
            raise ValueError(
                f"weight_decay: FBGEMM's {self.name} has none; use adam, rowwise_adam or "
                "rowwise_adagrad, or a regularizer in the loss"
            )
