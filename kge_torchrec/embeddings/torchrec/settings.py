"""Settings of tables on their way through TorchRec: the dictionary ``fused_params``.

TorchRec passes one dictionary from the sharder to the kernels.  Ours has FBGEMM's names, and a few
of our own, which FBGEMM's table must not get.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from kge_torchrec.embeddings.optimizers import TABLE_OPTIMIZERS, TableOptimizer, optimizer_class
from kge_torchrec.embeddings.tables import TableBlock

_ASCENDING, _DEFERRED, _FOREIGN = "ascending_ids", "deferred", "table_optimizer"
_EXCHANGE = "exchange_dtype"
_BLOCK, _TABLE, _BY_TABLE = "block", "table", "by_table"
_OURS = (_ASCENDING, _EXCHANGE, _DEFERRED, _FOREIGN, _BLOCK, _TABLE, _BY_TABLE)
_NAMES = {
    EmbOptimType[str(optimizer_class(name).fbgemm)]: name for name in TABLE_OPTIMIZERS
}  # our names by FBGEMM's


def fused_params(
    optimizer: TableOptimizer,
    *,
    ascending_ids: bool = False,
    deferred: bool = False,
    exchange_dtype: str = "fp32",
) -> dict[str, Any]:
    """Return the value of ``EmbeddingCollectionSharder(fused_params=...)``.

    Args:
        optimizer: The optimizer of the table.
        ascending_ids: Whether every lookup has distinct ids in ascending order.
        deferred: Whether the table steps with its optimizer instead of inside backward.  The CPU
            table always does.
        exchange_dtype: What rows and gradients travel as between ranks.
    """
    params: dict[str, Any] = {
        _ASCENDING: ascending_ids,
        _DEFERRED: deferred,
        _EXCHANGE: exchange_dtype,
        "optimizer": EmbOptimType[optimizer.kind.fbgemm or "EXACT_SGD"],
        "learning_rate": optimizer.lr,
        "beta1": optimizer.betas[0],
        "beta2": optimizer.betas[1],
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if not optimizer.is_ours:
        params[_FOREIGN] = optimizer  # "optimizer" is only a placeholder then
    if optimizer.kind.weight_decay == "l2" and optimizer.weight_decay:
        # FBGEMM ignores weight_decay for this optimizer unless the mode is set.
        params["weight_decay_mode"] = WeightDecayMode.L2
    return params


def has_ascending_ids(params: dict[str, Any] | None) -> bool:
    """Return whether ``params`` has ``ascending_ids`` set."""
    return bool(params and params.get(_ASCENDING))


def exchange_dtype_of(params: dict[str, Any] | None) -> str:
    """Return the ``exchange_dtype`` of ``params``."""
    return (params or {}).get(_EXCHANGE, "fp32")


def is_deferred(params: dict[str, Any] | None) -> bool:
    """Return whether ``params`` has ``deferred`` set."""
    return bool(params and params.get(_DEFERRED))


def of_fbgemm(params: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``params`` without our own keys, as FBGEMM's table accepts it."""
    return {k: v for k, v in (params or {}).items() if k not in _OURS}


def several_tables(by_table: Mapping[str, dict[str, Any]], block: TableBlock) -> dict[str, Any]:
    """Return ``fused_params`` for several tables.

    Args:
        by_table: ``fused_params`` of each table by name.
        block: This rank's rows.
    """
    own = {name: {**params, _BLOCK: block, _TABLE: name} for name, params in by_table.items()}
    return {**next(iter(own.values())), _BY_TABLE: own}


def of_table(params: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the ``fused_params`` of one of several tables; TorchRec groups tables by them."""
    return params.get(_BY_TABLE, {}).get(name, params)


def block_of(params: dict[str, Any] | None) -> TableBlock | None:
    """Return the block that several tables share, or None."""
    return (params or {}).get(_BLOCK)


def from_fused_params(params: dict[str, Any]) -> TableOptimizer:
    """Invert ``fused_params``.  Keys that only FBGEMM's table reads are ignored.

    Raises:
        ValueError: The CPU table does not have this optimizer.
    """
    if _FOREIGN in params:
        return params[_FOREIGN]
    fbgemm_name = params.get("optimizer", EmbOptimType.EXACT_SGD)
    if fbgemm_name not in _NAMES:
        raise ValueError(
            f"name: FBGEMM's {fbgemm_name} has no CPU table here; "
            f"there are {', '.join(TABLE_OPTIMIZERS)}"
        )
    default = TableOptimizer()
    return TableOptimizer(
        name=_NAMES[fbgemm_name],
        lr=params.get("learning_rate", default.lr),
        betas=(
            params.get("beta1", default.betas[0]),
            params.get("beta2", default.betas[1]),
        ),
        eps=params.get("eps", default.eps),
        weight_decay=params.get("weight_decay", 0.0),
    )
