"""The entity table as a TorchRec EmbeddingCollection: construction, kernels, and access to rows.

FBGEMM's kernel steps inside the backward of a lookup.  This is fastest, but it rules out summing
several backward passes and clipping the sum.  ``DeferredEmbedding`` keeps the gradients on this
rank instead and steps once, with one more lookup and backward for all of them.

FBGEMM's CPU op supports neither Adam nor tables without rows.  ``CpuFusedTable`` implements the
part of ``SplitTableBatchedEmbeddingBagsCodegen`` that TorchRec uses, for one table.

Shapes: N entities, n rows on this rank, D elements per row, M ids or gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BatchedFusedEmbedding,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.types import DataType

from kge_torchrec.embeddings.backend import ENTITY, EntityShard
from kge_torchrec.embeddings.init import zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import TABLE_OPTIMIZERS, TableOptimizer, optimizer_class
from kge_torchrec.embeddings.row_gradients import (
    PendingGradients,
    RowGradients,
    recorded_lookup,
)
from kge_torchrec.embeddings.row_gradients import (
    step_rows as step_foreign_rows,
)
from kge_torchrec.kernels.rows import update_rows

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
        self._optim = DeferredOptimizer(config, self._emb_module, pg, self)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows (M, D) of the local ids (M,)."""
        (rows,) = self.split_embedding_weights()
        return recorded_lookup(rows.detach(), features.values(), self.pending)

    def step(self) -> None:
        """Step the rows looked up since the last step, if there was a backward."""
        if self.pending:
            step_rows(self._emb_module, [self.pending.take()])


class DeferredOptimizer(EmbeddingFusedOptimizer):
    """An optimizer whose ``step`` steps a table that keeps its gradients.

    Args:
        config: TorchRec's description of the table.
        table: The table, which TorchRec reads its states from.
        pg: The ranks.
        owner: Has ``pending`` and ``step``: the CPU table, or the kernel around FBGEMM's.
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
        self._owner.pending.clear()

    def step(self, closure: Any = None) -> None:
        super().step(closure)  # passes the learning rate to the table
        self._owner.step()


class CpuFusedTable(nn.Module):
    """A table of n rows whose optimizer runs in ``step``, not in backward.

    All gradients since the last step form one sum, so accumulating, clipping and scaling are exact.
    FBGEMM counts every lookup as an iteration.  This table counts steps, so lookups between steps,
    as in ranking, change nothing.
    """

    weights_host: Tensor

    def __init__(self, num_rows: int, dim: int, optimizer: TableOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self._step_rows = update_rows if optimizer.is_ours else step_foreign_rows
        self.learning_rate = optimizer.lr
        self.iteration = 0
        # TorchRec slices the table itself and expects it flat, under FBGEMM's names.
        self.embedding_specs = [(num_rows, dim, EmbeddingLocation.HOST, None)]
        self.weights_physical_offsets = [0]
        self.weights_precision = SparseType.FP32
        weights = zeros_on_huge_pages(num_rows * dim)
        self.register_buffer("weights_host", weights, persistent=False)
        for name, rowwise in optimizer.kind.states:
            shape = (num_rows,) if rowwise else (num_rows, dim)
            self.register_buffer(name, zeros_on_huge_pages(*shape), persistent=False)
        self.pending = PendingGradients()

    @property
    def rows(self) -> Tensor:
        """The table as an (n, D) view."""
        num_rows, dim, *_ = self.embedding_specs[0]
        return self.weights_host.view(num_rows, dim)

    def forward(self, indices: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Look up rows.

        Args:
            indices: (M,) local ids.
            offsets: Ignored; part of FBGEMM's interface.

        Returns:
            (M, D).

        Raises:
            IndexError: An id is outside [0, n).
        """
        return recorded_lookup(self.rows, indices, self.pending)

    def step(self) -> None:
        """Step the rows looked up since the last step, if there was a backward."""
        if self.pending:
            self.iteration += 1
            self.update(self.pending.take())

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """Take one step with gradients of distinct rows, in parts, without a lookup."""
        self.iteration += 1
        for part in gradients:
            self.update(part.without(self.pending.frozen))

    @torch.no_grad()
    def update(self, gradients: RowGradients) -> None:
        """Run the optimizer's step number ``iteration``."""
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
        _check(config)
        optimizer = from_fused_params(config.fused_params or {})
        self._emb_module = CpuFusedTable(self._local_rows[0], self._local_cols[0], optimizer)
        self._optim = DeferredOptimizer(config, self._emb_module, pg, self._emb_module)
        self.pending = self._emb_module.pending
        self.init_parameters()


def _check(config: GroupedEmbeddingConfig) -> None:
    if len(config.embedding_tables) != 1:
        names = ", ".join(table.name for table in config.embedding_tables)
        raise ValueError(f"the CPU table holds one table, not several ({names})")
    if config.data_type != DataType.FP32:
        raise ValueError(
            f"the CPU table holds float32 numbers, not {config.data_type.value}; "
            "16-bit tables run on CUDA only"
        )


# Our own keys: TorchRec passes one dictionary of settings from the sharder to the kernel, so we
# add our settings there.  FBGEMM does not know them.
_ASCENDING, _DEFERRED, _FOREIGN = "ascending_ids", "deferred", "table_optimizer"
_NAMES = {
    EmbOptimType[str(optimizer_class(name).fbgemm)]: name for name in TABLE_OPTIMIZERS
}  # our names by FBGEMM's


def fused_params(
    optimizer: TableOptimizer, *, ascending_ids: bool = False, deferred: bool = False
) -> dict[str, Any]:
    """Return the value of ``EmbeddingCollectionSharder(fused_params=...)``.

    Args:
        optimizer: The optimizer of the table.
        ascending_ids: Whether every lookup has distinct ids in ascending order.
        deferred: Whether the table steps with its optimizer instead of inside backward.  The CPU
            table always does.
    """
    params: dict[str, Any] = {
        _ASCENDING: ascending_ids,
        _DEFERRED: deferred,
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


def is_deferred(params: dict[str, Any] | None) -> bool:
    """Return whether ``params`` has ``deferred`` set."""
    return bool(params and params.get(_DEFERRED))


def of_fbgemm(params: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``params`` without our own keys, as FBGEMM's table accepts it."""
    return {k: v for k, v in (params or {}).items() if k not in (_ASCENDING, _DEFERRED, _FOREIGN)}


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
