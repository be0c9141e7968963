"""The entity table as a TorchRec EmbeddingCollection: built before sharding, looked into after.

Shapes: N entities, D numbers per entity.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.types import DataType

from kge_torchrec.entities.contract import ENTITY, EntityShard
from kge_torchrec.entities.row_gradients import PendingGradients, RowGradients
from kge_torchrec.entities.torchrec.cpu_table import CpuFusedTable
from kge_torchrec.entities.torchrec.fbgemm_table import set_steps_taken, step_rows, steps_taken

_DATA_TYPES = {
    torch.float32: DataType.FP32,
    torch.float16: DataType.FP16,
    torch.bfloat16: DataType.BF16,
}


def entity_collection(
    num_entities: int, dim: int, dtype: torch.dtype = torch.float32
) -> EmbeddingCollection:
    """An (N, D) table on the meta device: it takes no memory until it is sharded.

    Raises ValueError for sizes below one or a dtype that is no float32, float16 or bfloat16.
    """
    if num_entities < 1 or dim < 1:
        raise ValueError(f"an entity table of {num_entities} x {dim} has no numbers")
    if dtype not in _DATA_TYPES:
        raise ValueError(f"dtype: {dtype} is none of {', '.join(map(str, _DATA_TYPES))}")
    config = EmbeddingConfig(
        name=ENTITY,
        feature_names=[ENTITY],
        num_embeddings=num_entities,
        embedding_dim=dim,
        data_type=_DATA_TYPES[dtype],
    )
    return EmbeddingCollection(tables=[config], device=torch.device("meta"))


def entity_shard(sharded_model: nn.Module) -> EntityShard:
    """This rank's rows, as a view of the table that the sharded model holds.

    Rows that a GPU cache holds are written back and dropped first, so the view may be read and
    written until the next lookup.  Raises ValueError if the model has no sharded entity table, or
    more than one.
    """
    kernel = _kernel(sharded_model)
    kernel.flush()
    kernel.purge()
    (table,) = kernel.config.embedding_tables
    (rows,) = kernel.split_embedding_weights()
    return EntityShard(
        rows=rows.detach(),
        first_row=table.local_metadata.shard_offsets[0],
        num_entities=table.num_embeddings,
    )


def pending_gradients(sharded_model: nn.Module) -> PendingGradients | None:
    """What backward leaves for the table's step; None if FBGEMM's kernel steps inside backward."""
    return getattr(_kernel(sharded_model), "pending", None)


def table_step(sharded_model: nn.Module) -> int:
    """Number of optimizer steps the table has taken; no state_dict holds it."""
    table = _kernel(sharded_model).emb_module
    return table.iteration if isinstance(table, CpuFusedTable) else steps_taken(table)


def set_table_step(sharded_model: nn.Module, step: int) -> None:
    """Sets what ``table_step`` reads: after loading a checkpoint, before the next lookup."""
    table = _kernel(sharded_model).emb_module
    if isinstance(table, CpuFusedTable):
        table.iteration = step
    else:
        set_steps_taken(table, step)


def step_table_rows(sharded_model: nn.Module, gradients: Iterable[RowGradients]) -> None:
    """One step of the table's optimizer on local rows, each of them in one part only."""
    table = _kernel(sharded_model).emb_module
    if isinstance(table, CpuFusedTable):
        table.step_rows(gradients)
    else:
        step_rows(table, gradients)


def _kernel(sharded_model: nn.Module) -> nn.Module:
    """TorchRec's wrapper of the local table, FBGEMM's or ours."""
    kernels = [
        kernel
        for module in sharded_model.modules()
        if isinstance(module, ShardedEmbeddingCollection)
        for lookup in module._lookups
        for kernel in lookup._emb_modules
    ]
    if len(kernels) != 1:
        raise ValueError(f"expected one sharded entity table in the model, found {len(kernels)}")
    return kernels[0]
