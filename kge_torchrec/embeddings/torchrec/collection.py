"""The entity table as a TorchRec EmbeddingCollection: construction, kernels, and access to rows.

FBGEMM's kernel steps inside the backward of a lookup.  This is fastest, but it rules out summing
several backward passes and clipping the sum.  ``DeferredEmbedding`` keeps the gradients on this
rank instead and steps once, with one more lookup and backward for all of them.

With entities.placement managed_caching the table lies in main memory, and FBGEMM caches rows on the
GPU.  Rows in main memory are old until ``entity_shard`` writes the cache back, so lookups go
through FBGEMM.  Backward updates the places of the cache that its lookup used: nothing may call
``entity_shard`` in between.

FBGEMM's CPU op supports neither Adam nor tables without rows.  ``CpuFusedTable`` implements the
part of ``SplitTableBatchedEmbeddingBagsCodegen`` that TorchRec uses, for one table.

Several tables, one per node type, lie in one ``TableBlock``.  Each has a kernel of its own, which
only steps; lookups go to the block.

Shapes: N entities, n rows on this rank, D elements per row, M ids or gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BatchedFusedEmbedding,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig

from kge_torchrec.embeddings.backend import ENTITY, EntityShard
from kge_torchrec.embeddings.init import zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import RowGradients, TableBlock
from kge_torchrec.embeddings.row_gradients import (
    step_rows as step_foreign_rows,
)
from kge_torchrec.embeddings.tables import block_of_one
from kge_torchrec.embeddings.torchrec.settings import settings_of
from kge_torchrec.kernels.rows import update_rows

if TYPE_CHECKING:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        SplitTableBatchedEmbeddingBagsCodegen,
    )


def entity_collection(rows: int | Mapping[str, int], dim: int) -> EmbeddingCollection:
    """Make tables on the meta device, which take no memory until they are sharded.

    Args:
        rows: N, for the single table ENTITY, or the rows of each table by name.
        dim: D.
    """
    sizes = {ENTITY: rows} if isinstance(rows, int) else rows
    configs = [
        EmbeddingConfig(
            name=name, feature_names=[name], num_embeddings=num_entities, embedding_dim=dim
        )
        for name, num_entities in sizes.items()
    ]
    return EmbeddingCollection(tables=configs, device=torch.device("meta"))


def entity_shard(sharded_model: nn.Module) -> EntityShard:
    """Return this rank's rows as a view of the tables of a sharded model.

    Cached rows on the GPU are first written back and dropped, so the view may be read and written
    until the next lookup.
    """
    kernels = _kernels(sharded_model)
    for kernel in kernels:
        kernel.flush()
        kernel.purge()
    in_main = _is_cached(kernels[0].config)
    tables = [kernel.config.embedding_tables[0] for kernel in kernels]
    block = gradient_block(sharded_model)
    if len(kernels) > 1 and block is not None:
        rows, first_row = block.rows, block.first_row
    else:
        (rows,) = kernels[0].split_embedding_weights()
        first_row = tables[0].local_metadata.shard_offsets[0]
    return EntityShard(
        rows=rows.detach(),
        first_row=first_row,
        num_entities=sum(table.num_embeddings for table in tables),
        in_main_memory=in_main,
    )


def gradient_block(sharded_model: nn.Module) -> TableBlock | None:
    """Return what keeps table gradients for the step; None if FBGEMM steps inside backward."""
    return getattr(_kernels(sharded_model)[0], "block", None)


def table_step(sharded_model: nn.Module) -> int:
    """Return the number of optimizer steps of the tables, which no state_dict holds."""
    table = _kernels(sharded_model)[0].emb_module
    return table.iteration if isinstance(table, CpuFusedTable) else steps_taken(table)


def set_table_step(sharded_model: nn.Module, step: int) -> None:
    """Set the step count, after loading a checkpoint and before the next lookup."""
    for table in (kernel.emb_module for kernel in _kernels(sharded_model)):
        if isinstance(table, CpuFusedTable):
            table.iteration = step
        else:
            set_steps_taken(table, step)


def step_table_rows(sharded_model: nn.Module, gradients: Iterable[RowGradients]) -> None:
    """Take one step of the tables' optimizers on local rows; parts have no row in common."""
    kernels, block = _kernels(sharded_model), gradient_block(sharded_model)
    by_name = {kernel.config.embedding_tables[0].name: kernel.emb_module for kernel in kernels}
    step = table_step(sharded_model) + 1
    set_table_step(sharded_model, step)
    for part in gradients:
        kept = part if block is None else part.without(block.frozen)
        for name, own in ((ENTITY, kept),) if block is None else kept.split(block.parts):
            table = by_name[name]
            if isinstance(table, CpuFusedTable):
                table.iteration = step - 1  # parts of one step have no row in common
                table.step(own)
            else:
                step_rows(table, own, step)


def table_states(sharded_model: nn.Module) -> list[dict[str, Tensor]]:
    """Return the optimizer states of this rank's rows, for each table in order, by name.

    The first state of a table is called momentum1, as by TorchRec.
    """
    return [
        {
            "momentum1" if place == 0 else name: state
            for place, (name, state) in enumerate(own.items())
        }
        for kernel in _kernels(sharded_model)
        for own in kernel.emb_module.get_optimizer_state() or [{}]
    ]


def _kernels(sharded_model: nn.Module) -> list[BatchedFusedEmbedding]:
    """Return TorchRec's wrapper of each local table (FBGEMM's or ours)."""
    return [
        kernel
        for module in sharded_model.modules()
        if isinstance(module, ShardedEmbeddingCollection)
        for lookup in module._lookups
        for kernel in lookup._emb_modules
    ]


def _is_cached(config: GroupedEmbeddingConfig) -> bool:
    """Return whether the rows lie in main memory, with a cache on the GPU."""
    caching = EmbeddingComputeKernel.FUSED_UVM_CACHING  # the group is of FUSED then
    return config.embedding_tables[0].compute_kernel == caching


def steps_taken(table: SplitTableBatchedEmbeddingBagsCodegen) -> int:
    """Return the number of optimizer steps that FBGEMM's table has counted."""
    # FBGEMM uses the copy on the host for Adam's bias correction; reading it does not synchronize.
    return int(table.iter_cpu.item() or table.iter.item())


def set_steps_taken(table: SplitTableBatchedEmbeddingBagsCodegen, steps: int) -> None:
    """Set the step count of FBGEMM's table without synchronizing with the device."""
    table.iter.fill_(steps)
    table.iter_cpu.fill_(steps)


def read_rows(table: SplitTableBatchedEmbeddingBagsCodegen, ids: Tensor) -> Tensor:
    """Look up rows (M,) -> (M, D) of FBGEMM's table through its cache, without counting a step."""
    counts = table.iter_cpu, table.iter
    before = [count.clone() for count in counts]  # reading them could wait for the GPU
    with torch.no_grad():
        rows: Tensor = table(indices=ids, offsets=_bags(ids))
    for count, value in zip(counts, before, strict=True):
        count.copy_(value)
    return rows


def _bags(ids: Tensor) -> Tensor:
    """Return the offsets of one bag per id, because FBGEMM uses one warp per bag."""
    return torch.arange(ids.numel() + 1, device=ids.device)


def step_rows(
    table: SplitTableBatchedEmbeddingBagsCodegen, gradients: RowGradients, step: int
) -> None:
    """Take FBGEMM's step number ``step`` on some rows; a row's gradients are summed.

    Parts of one step have no row in common.
    """
    if gradients.ids.numel():
        set_steps_taken(table, step - 1)  # FBGEMM counts every lookup as a step
        with torch.enable_grad():
            rows = table(indices=gradients.ids, offsets=_bags(gradients.ids))
        rows.backward(gradients.grad.to(rows.dtype))
    set_steps_taken(table, step)


class DeferredEmbedding(BatchedFusedEmbedding):
    """TorchRec's kernel around FBGEMM's table, with gradients kept for the optimizer's step.

    All gradients since the last step form one sum, so accumulating, clipping and scaling are exact.
    The cost is (M, D) elements of memory and one more pass over the rows of a batch.

    Args:
        config: TorchRec's description of the table.
        pg: The ranks.
        device: Device of the table.
        block: The block that holds the table's rows, if there are several tables.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        block: TableBlock | None = None,
    ) -> None:
        super().__init__(config, pg, device)
        self._name = config.embedding_tables[0].name
        if block is None:
            (rows,) = self.split_embedding_weights()
            block = TableBlock(rows.detach(), 0, {self._name: range(len(rows))})
        else:
            place = "weights_host" if self._emb_module.weights_host.numel() else "weights_dev"
            getattr(self._emb_module, place).data = block.rows_of(self._name).reshape(-1)
        if _is_cached(config):
            block.read = partial(read_rows, self._emb_module)
        self.block = block
        self._optim = DeferredOptimizer(config, self._emb_module, pg, self)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows (M, D) of the local ids (M,)."""
        return self.block.lookup(features.values())

    def step(self) -> None:
        """Step the rows looked up since the last step, if there was a backward."""
        gradients = self.block.take(self._name)
        if gradients is not None:
            step_rows(self._emb_module, gradients, steps_taken(self._emb_module) + 1)


class DeferredOptimizer(EmbeddingFusedOptimizer):
    """An optimizer whose ``step`` steps a table that keeps its gradients.

    Args:
        config: TorchRec's description of the table.
        table: The table, which TorchRec reads its states from.
        pg: The ranks.
        owner: Has ``block`` and ``step``: the CPU table, or the kernel around FBGEMM's.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        table: nn.Module,
        pg: dist.ProcessGroup | None,
        owner: CpuFusedTable | DeferredEmbedding,
    ) -> None:
        super().__init__(config, table, pg)
        self._owner = owner

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)
        self._owner.block.gradients.clear()

    def step(self, closure: Any = None) -> None:
        super().step(closure)  # passes the learning rate to the table
        self._owner.step()


class CpuFusedTable(nn.Module):
    """A table of n rows whose optimizer runs in ``step``, not in backward.

    All gradients since the last step form one sum, so accumulating, clipping and scaling are exact.
    FBGEMM counts every lookup as an iteration.  This table counts steps, so lookups between steps,
    as in ranking, change nothing.

    Args:
        block: Holds the rows of the table, and their gradients until the step.
        name: Name of the table in the block.
        optimizer: Its optimizer.

    Attributes:
        rows: The table as an (n, D) view.
    """

    def __init__(self, block: TableBlock, name: str, optimizer: TableOptimizer) -> None:
        super().__init__()
        self.block, self._name = block, name
        self.rows = block.rows_of(name)
        num_rows, dim = self.rows.shape
        self.optimizer = optimizer
        self._step_rows = update_rows if optimizer.is_ours else step_foreign_rows
        self.learning_rate = optimizer.lr
        self.iteration = 0
        # TorchRec slices the table itself and expects it flat, under FBGEMM's names.
        self.embedding_specs = [(num_rows, dim, EmbeddingLocation.HOST, None)]
        self.weights_physical_offsets = [0]
        self.weights_precision = SparseType.FP32
        self.register_buffer("weights_host", self.rows.view(-1), persistent=False)
        for name, rowwise in optimizer.kind.states:
            shape = (num_rows,) if rowwise else (num_rows, dim)
            self.register_buffer(name, zeros_on_huge_pages(*shape), persistent=False)

    def forward(self, indices: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Look up rows of the block.

        Args:
            indices: (M,) local ids.
            offsets: Ignored; part of FBGEMM's interface.

        Returns:
            (M, D).

        Raises:
            IndexError: An id is outside [0, n).
        """
        return self.block.lookup(indices)

    @torch.no_grad()
    def step(self, gradients: RowGradients | None = None) -> None:
        """Take the optimizer's next step.

        Args:
            gradients: Those of some rows; by default of the rows looked up since the last step, if
                there was a backward.
        """
        gradients = self.block.take(self._name) if gradients is None else gradients
        if gradients is None:
            return
        self.iteration += 1
        numbers = self.optimizer, self.learning_rate, self.iteration
        _, *states = self.buffers()  # the first one is the table
        self._step_rows(*numbers, gradients.ids, gradients.grad, self.rows, *states)

    # The interface to TorchRec's kernel wrapper and its EmbeddingFusedOptimizer.

    def split_embedding_weights(self) -> list[Tensor]:
        return [self.rows]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        states = {name: self.get_buffer(name) for name, _ in self.optimizer.kind.states}
        return [states] if states else []  # like FBGEMM: no entry for sgd, which has no state

    def get_learning_rate(self) -> float:
        return self.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        self.learning_rate = float(lr)

    def set_optimizer_step(self, step: int) -> None:
        self.iteration = int(step)

    def flush(self) -> None:
        """Do nothing: there is no cache."""

    def reset_cache_states(self) -> None:
        """Do nothing: there is no cache."""


class CpuFusedEmbedding(BatchedFusedEmbedding):
    """TorchRec's kernel around ``CpuFusedTable``."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        # Skip BatchedFusedEmbedding.__init__, which would build FBGEMM's table.
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        own, (table,) = settings_of(config.fused_params), config.embedding_tables
        self.block = own.block or block_of_one(table.local_rows, table.local_cols)
        self._emb_module = CpuFusedTable(self.block, table.name, own.optimizer)
        self._optim = DeferredOptimizer(config, self._emb_module, pg, self._emb_module)
        self.init_parameters()
