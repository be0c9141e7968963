"""Settings of tables on their way through TorchRec: the dictionary ``fused_params``.

TorchRec passes one dictionary from the sharder to the kernels.  Ours has FBGEMM's names and an
object with our own settings, which FBGEMM's table must not get.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import TableBlock

_OURS, _BY_TABLE = "kge_torchrec", "by_table"


@dataclass(frozen=True)
class TableSettings:
    """Our own settings of a table.  TorchRec makes one group of tables with equal settings.

    Attributes:
        optimizer: The optimizer of the table.
        ascending_ids: Whether every lookup has distinct ids in ascending order.
        deferred: Whether the table steps with its optimizer instead of inside backward.  The CPU
            table always does.
        exchange_dtype: What rows and gradients travel as between ranks.
        block: This rank's rows, if several tables share a block.
        name: The table's name in the block.
    """

    optimizer: TableOptimizer
    ascending_ids: bool = False
    deferred: bool = False
    exchange_dtype: str = "fp32"
    block: TableBlock | None = None
    name: str = ""


def fused_params(optimizer: TableOptimizer, **own: Any) -> dict[str, Any]:
    """Return the value of ``EmbeddingCollectionSharder(fused_params=...)``.

    Args:
        optimizer: The optimizer of the table.
        own: Other fields of ``TableSettings``.
    """
    params: dict[str, Any] = {
        _OURS: TableSettings(optimizer, **own),
        # A placeholder where FBGEMM does not have the optimizer.
        "optimizer": EmbOptimType[optimizer.kind.fbgemm or "EXACT_SGD"],
        "learning_rate": optimizer.lr,
        "beta1": optimizer.betas[0],
        "beta2": optimizer.betas[1],
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if optimizer.kind.weight_decay == "l2" and optimizer.weight_decay:
        # FBGEMM ignores weight_decay for this optimizer unless the mode is set.
        params["weight_decay_mode"] = WeightDecayMode.L2
    return params


def settings_of(params: dict[str, Any] | None) -> TableSettings:
    """Return our own settings in ``fused_params``, which TorchRec may have extended."""
    assert params is not None  # TorchRec passes on those of the sharder
    settings: TableSettings = params[_OURS]
    return settings


def of_fbgemm(params: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``params`` without our own keys, as FBGEMM's table accepts it."""
    return {k: v for k, v in (params or {}).items() if k not in (_OURS, _BY_TABLE)}


def several_tables(by_table: Mapping[str, dict[str, Any]], block: TableBlock) -> dict[str, Any]:
    """Return ``fused_params`` for several tables.

    Args:
        by_table: ``fused_params`` of each table by name.
        block: This rank's rows.
    """
    own = {
        name: {**params, _OURS: replace(settings_of(params), block=block, name=name)}
        for name, params in by_table.items()
    }
    return {**next(iter(own.values())), _BY_TABLE: own}


def of_table(params: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """Return the ``fused_params`` of one of several tables; TorchRec groups tables by them."""
    params = params or {}
    return params.get(_BY_TABLE, {}).get(name, params)
