"""A TableOptimizer in the words of TorchRec's sharder, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from kge_torchrec.entities.table_optimizer import TableOptimizer

_FBGEMM_NAMES = {
    "adam": EmbOptimType.ADAM,
    "rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}
# Not FBGEMM's: TorchRec hands the table's settings from the sharder down to its kernel in one
# dictionary, and these ride along.
_ASCENDING, _DEFERRED = "ascending_ids", "deferred"
_NAMES = {fbgemm: name for name, fbgemm in _FBGEMM_NAMES.items()}


def fused_params(
    optimizer: TableOptimizer, *, ascending_ids: bool = False, deferred: bool = False
) -> dict[str, Any]:
    """The arguments of EmbeddingCollectionSharder(fused_params=...).

    ascending_ids: every lookup asks for distinct ids in ascending order.
    deferred: the table steps when its optimizer does, not inside backward; the CPU table always.
    """
    params: dict[str, Any] = {
        _ASCENDING: ascending_ids,
        _DEFERRED: deferred,
        "optimizer": _FBGEMM_NAMES[optimizer.name],
        "learning_rate": optimizer.lr,
        "beta1": optimizer.betas[0],
        "beta2": optimizer.betas[1],
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if optimizer.name == "rowwise_adagrad" and optimizer.weight_decay:
        # FBGEMM ignores weight_decay there unless it is told which kind.
        params["weight_decay_mode"] = WeightDecayMode.L2
    return params


def asks_ascending(params: dict[str, Any] | None) -> bool:
    """Whether ``fused_params`` was told of ascending ids."""
    return bool(params and params.get(_ASCENDING))


def is_deferred(params: dict[str, Any] | None) -> bool:
    """Whether ``fused_params`` was told to defer the step."""
    return bool(params and params.get(_DEFERRED))


def of_fbgemm(params: dict[str, Any] | None) -> dict[str, Any]:
    """What of it FBGEMM's table takes."""
    return {k: v for k, v in (params or {}).items() if k not in (_ASCENDING, _DEFERRED)}


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
    )
