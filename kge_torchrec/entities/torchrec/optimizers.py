"""Which optimizer steps the entity table, and how TorchRec is told about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

_FBGEMM_NAMES = {
    "adam": EmbOptimType.ADAM,
    "rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}
_NAMES = {fbgemm: name for name, fbgemm in _FBGEMM_NAMES.items()}


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer of the entity table; it steps inside backward, on touched rows only.

    The Adams count steps for the whole table, not per row, and decay weights decoupled from the
    gradient; rowwise_adagrad adds the decay to the gradient (L2).  FBGEMM's adagrad and sgd have
    no weight decay.  ``max_gradient`` clamps each number of each gradient that reaches the table.

    Raises ValueError, naming the field, for a value that makes no sense.
    """

    name: str = "adam"
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_gradient: float | None = None

    def __post_init__(self) -> None:
        if self.name not in _FBGEMM_NAMES:
            raise ValueError(f"name: {self.name!r} is none of {', '.join(_FBGEMM_NAMES)}")
        for field in ("lr", "eps", "weight_decay"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field}: {value} is not a finite number >= 0")
        object.__setattr__(self, "betas", tuple(self.betas))  # YAML gives lists
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas} are not two numbers in [0, 1)")
        if self.max_gradient is not None and not self.max_gradient > 0:
            raise ValueError(f"max_gradient: {self.max_gradient} is not a number > 0 or None")
        if self.weight_decay and self.name in ("adagrad", "sgd"):
            raise ValueError(
                f"weight_decay: FBGEMM's {self.name} has none; use adam, rowwise_adam or "
                "rowwise_adagrad, or a regularizer in the loss"
            )

    def fused_params(self) -> dict[str, Any]:
        """The arguments of EmbeddingCollectionSharder(fused_params=...)."""
        params: dict[str, Any] = {
            "optimizer": _FBGEMM_NAMES[self.name],
            "learning_rate": self.lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }
        if self.name == "rowwise_adagrad" and self.weight_decay:
            # FBGEMM ignores weight_decay there unless it is told which kind.
            params["weight_decay_mode"] = WeightDecayMode.L2
        if self.max_gradient is not None:
            params.update(gradient_clipping=True, max_gradient=self.max_gradient)
        return params

    @staticmethod
    def from_fused_params(params: dict[str, Any]) -> TableOptimizer:
        """The inverse of ``fused_params``; keys that only FBGEMM's own table reads are ignored.

        Raises ValueError for an optimizer that the CPU table does not have.
        """
        fbgemm_name = params.get("optimizer", EmbOptimType.EXACT_SGD)
        if fbgemm_name not in _NAMES:
            raise ValueError(
                f"name: FBGEMM's {fbgemm_name} has no CPU table here; "
                f"there are {', '.join(_FBGEMM_NAMES)}"
            )
        default = {field.name: field.default for field in fields(TableOptimizer)}
        return TableOptimizer(
            name=_NAMES[fbgemm_name],
            lr=params.get("learning_rate", default["lr"]),
            betas=(
                params.get("beta1", default["betas"][0]),
                params.get("beta2", default["betas"][1]),
            ),
            eps=params.get("eps", default["eps"]),
            weight_decay=params.get("weight_decay", 0.0),
            max_gradient=params.get("max_gradient") if params.get("gradient_clipping") else None,
        )
