"""The entity table as a TorchRec EmbeddingCollection: built before sharding, looked into after.

FBGEMM's kernel steps inside the backward of a lookup.  That is the fastest way, but whoever wants
to sum several backward passes or to clip their sum comes too late.  ``DeferredEmbedding`` keeps
what reaches this rank instead, and steps once, with one lookup and backward of all of it.

Shapes: N entities, n rows on this rank, D numbers per entity, M gradients.
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
from kge_torchrec.embeddings.pending import PendingGradients, RowGradients, recorded_lookup
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
    table, pending = _kernel(sharded_model).emb_module, pending_gradients(sharded_model)
    if isinstance(table, CpuFusedTable):
        table.step_rows(gradients)
    else:
        frozen = None if pending is None else pending.frozen
        step_rows(table, (part.without(frozen) for part in gradients))


def _kernel(sharded_model: nn.Module) -> BatchedFusedEmbedding:
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


def steps_taken(table: SplitTableBatchedEmbeddingBagsCodegen) -> int:
    """Number of optimizer steps that FBGEMM's table has counted; no state_dict holds it."""
    # FBGEMM corrects the Adams' bias with the copy on the host, which can be read without waiting.
    return int(table.iter_cpu.item() or table.iter.item())


def set_steps_taken(table: SplitTableBatchedEmbeddingBagsCodegen, steps: int) -> None:
    """Sets what ``steps_taken`` reads, without waiting for the device."""
    table.iter.fill_(steps)
    table.iter_cpu.fill_(steps)


def step_rows(
    table: SplitTableBatchedEmbeddingBagsCodegen, gradients: Iterable[RowGradients]
) -> None:
    """One step of FBGEMM's optimizer, with gradients in parts; no row is in two of them.

    Those of a row within a part are summed.
    """
    step = steps_taken(table)
    for part in gradients:
        if part.ids.numel() == 0:
            continue
        set_steps_taken(table, step)  # every lookup counts as one
        # a bag each, as each has a warp
        offsets = torch.arange(part.ids.numel() + 1, device=part.ids.device)
        with torch.enable_grad():
            rows = table(indices=part.ids, offsets=offsets)
        rows.backward(part.grad.to(rows.dtype))
    set_steps_taken(table, step + 1)


class DeferredEmbedding(BatchedFusedEmbedding):
    """TorchRec's kernel around FBGEMM's table, with gradients kept for the optimizer's step.

    All gradients since the last step are one sum, so that accumulating, clipping and scaling are
    exact.  It takes (M, D) numbers more memory and one more pass over the rows of a batch.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, pg, device)
        self.pending = PendingGradients()
        self._optim = _StepsWhenTold(config, self._emb_module, pg, self.pending)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(M, D) rows of the local ids."""
        (rows,) = self.split_embedding_weights()
        return recorded_lookup(rows.detach(), features.values(), self.pending)


class _StepsWhenTold(EmbeddingFusedOptimizer):
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
        super().step(closure)  # gives the table its learning rate
        if self._pending:
            step_rows(self._table, [self._pending.take()])
