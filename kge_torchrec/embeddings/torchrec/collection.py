"""The entity table as a TorchRec EmbeddingCollection: construction, and access after sharding.

FBGEMM's kernel steps inside the backward of a lookup.  This is fastest, but it rules out summing
several backward passes and clipping the sum.  ``DeferredEmbedding`` keeps the gradients on this
rank instead and steps once, with one more lookup and backward for all of them.

Shapes: N entities, n rows on this rank, D elements per row, M gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.types import DataType

from kge_torchrec.embeddings.backend import ENTITY, EntityShard
from kge_torchrec.embeddings.row_gradients import PendingGradients, RowGradients, recorded_lookup
from kge_torchrec.embeddings.torchrec.cpu_table import CpuFusedTable

if TYPE_CHECKING:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        SplitTableBatchedEmbeddingBagsCodegen,
    )

_DATA_TYPES = {
    torch.float32: DataType.FP32,
    torch.float16: DataType.FP16,
    torch.bfloat16: DataType.BF16,
}


def entity_collection(
    num_entities: int, dim: int, dtype: torch.dtype = torch.float32
) -> EmbeddingCollection:
    """Make an (N, D) table on the meta device, which takes no memory until it is sharded.

    Raises:
        ValueError: A size is below one, or dtype is not float32, float16 or bfloat16.
    """
    if num_entities < 1 or dim < 1:
        raise ValueError(f"an entity table of {num_entities} x {dim} has no elements")
    if dtype not in _DATA_TYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DATA_TYPES))}")
    config = EmbeddingConfig(
        name=ENTITY,
        feature_names=[ENTITY],
        num_embeddings=num_entities,
        embedding_dim=dim,
        data_type=_DATA_TYPES[dtype],
    )
    return EmbeddingCollection(tables=[config], device=torch.device("meta"))


def entity_shard(sharded_model: nn.Module) -> EntityShard:
    """Return this rank's rows as a view of the table of a sharded model.

    Cached rows on the GPU are first written back and dropped, so the view may be read and written
    until the next lookup.

    Raises:
        ValueError: The model does not have exactly one sharded entity table.
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
    """Return the table gradients kept for the step; None if FBGEMM steps inside backward."""
    return getattr(_kernel(sharded_model), "pending", None)


def table_step(sharded_model: nn.Module) -> int:
    """Return the number of optimizer steps of the table, which no state_dict holds."""
    table = _kernel(sharded_model).emb_module
    return table.iteration if isinstance(table, CpuFusedTable) else steps_taken(table)


def set_table_step(sharded_model: nn.Module, step: int) -> None:
    """Set the step count, after loading a checkpoint and before the next lookup."""
    table = _kernel(sharded_model).emb_module
    if isinstance(table, CpuFusedTable):
        table.iteration = step
    else:
        set_steps_taken(table, step)


def step_table_rows(sharded_model: nn.Module, gradients: Iterable[RowGradients]) -> None:
    """Take one step of the table's optimizer on local rows; parts have no row in common."""
    table, pending = _kernel(sharded_model).emb_module, pending_gradients(sharded_model)
    if isinstance(table, CpuFusedTable):
        table.step_rows(gradients)
    else:
        frozen = None if pending is None else pending.frozen
        step_rows(table, (part.without(frozen) for part in gradients))


def _kernel(sharded_model: nn.Module) -> BatchedFusedEmbedding:
    """Return TorchRec's wrapper of the local table (FBGEMM's or ours)."""
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


def steps_taken(table: SplitTableBatchedEmbeddingBagsCodegen) -> int:
    """Return the number of optimizer steps that FBGEMM's table has counted."""
    # FBGEMM uses the copy on the host for Adam's bias correction; reading it does not synchronize.
    return int(table.iter_cpu.item() or table.iter.item())


def set_steps_taken(table: SplitTableBatchedEmbeddingBagsCodegen, steps: int) -> None:
    """Set the step count of FBGEMM's table without synchronizing with the device."""
    table.iter.fill_(steps)
    table.iter_cpu.fill_(steps)


def step_rows(
    table: SplitTableBatchedEmbeddingBagsCodegen, gradients: Iterable[RowGradients]
) -> None:
    """Take one step of FBGEMM's optimizer.

    Args:
        table: FBGEMM's table.
        gradients: Parts that have no row in common.  Within a part, a row's gradients are summed.
    """
    step = steps_taken(table)
    for part in gradients:
        if part.ids.numel() == 0:
            continue
        set_steps_taken(table, step)  # FBGEMM counts every lookup as a step
        # One bag per id, because FBGEMM uses one warp per bag.
        offsets = torch.arange(part.ids.numel() + 1, device=part.ids.device)
        with torch.enable_grad():
            rows = table(indices=part.ids, offsets=offsets)
        rows.backward(part.grad.to(rows.dtype))
    set_steps_taken(table, step + 1)


class DeferredEmbedding(BatchedFusedEmbedding):
    """TorchRec's kernel around FBGEMM's table, with gradients kept for the optimizer's step.

    All gradients since the last step form one sum, so accumulating, clipping and scaling are exact.
    The cost is (M, D) elements of memory and one more pass over the rows of a batch.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, pg, device)
        self.pending = PendingGradients()
        self._optim = _DeferredOptimizer(config, self._emb_module, pg, self.pending)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows (M, D) of the local ids (M,)."""
        (rows,) = self.split_embedding_weights()
        return recorded_lookup(rows.detach(), features.values(), self.pending)


class _DeferredOptimizer(EmbeddingFusedOptimizer):
    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        table: SplitTableBatchedEmbeddingBagsCodegen,
        pg: dist.ProcessGroup | None,
        pending: PendingGradients,
    ) -> None:
        super().__init__(config, table, pg)
        self._table, self._pending = table, pending

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)
        self._pending.clear()

    def step(self, closure: Any = None) -> None:
        super().step(closure)  # passes the learning rate to the table
        if self._pending:
            step_rows(self._table, [self._pending.take()])
