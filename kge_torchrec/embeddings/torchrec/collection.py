"""The entity table as a TorchRec EmbeddingCollection, its input, and its compute kernels.

``CpuFusedTable`` serves CPUs, where FBGEMM has no Adam, and tables per node type, as FBGEMM has one
optimizer per table.  On CUDA the table is FBGEMM's, whose optimizer runs inside the backward of a
lookup.  Where gradients of several backward passes are summed or clipped, ``DeferredEmbedding``
keeps them on this rank and steps once, with one more lookup and backward for all of them.

With entities.placement managed_caching the table lies in main memory, and FBGEMM caches rows on the
GPU.  Rows in main memory are old until ``FbgemmShard.shard`` writes the cache back, so lookups go
through FBGEMM.  Backward updates the places of the cache that its lookup used: nothing may call
``shard`` in between.

Shapes: N entities, n rows on this rank, D elements per row, M ids or gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BatchedFusedEmbedding,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule

from kge_torchrec.embeddings.backend import ENTITY, EntityShard
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.shard import EntityTable, TableShard

if TYPE_CHECKING:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        SplitTableBatchedEmbeddingBagsCodegen,
    )


def entity_collection(num_entities: int, dim: int) -> EmbeddingCollection:
    """Make the table (N, D) on the meta device, where it takes no memory until it is sharded."""
    config = EmbeddingConfig(
        name=ENTITY, feature_names=[ENTITY], num_embeddings=num_entities, embedding_dim=dim
    )
    return EmbeddingCollection(tables=[config], device=torch.device("meta"))


# Bags per lookup, by device type.  The rows are the same with any number of bags, but FBGEMM's CUDA
# kernels give each bag one thread or one warp, so one bag would be walked by a single one.  The
# number is the same on all ranks and in all steps: otherwise TorchRec takes batches for batches of
# variable size and sends them in a slower way.
LOOKUP_BAGS = {"cpu": 1, "cuda": 4096}


def feature_for(device_type: str) -> Callable[[Tensor], KeyedJaggedTensor]:
    """Return ``as_feature`` with the number of bags for a type of device."""
    return partial(as_feature, bags=LOOKUP_BAGS[device_type])


def as_feature(ids: Tensor, bags: int = 1) -> KeyedJaggedTensor:
    """Return entity ids as the input of the lookup, spread evenly over bags.

    The rows come back as ``collection(...)[ENTITY].values()``, (M, D), in the order of the ids.

    Args:
        ids: (M,) int64; M may be 0.
        bags: Number of bags, see ``LOOKUP_BAGS``.
    """
    count = ids.numel()
    if bags == 1:
        lengths, offsets = torch.tensor([count]), torch.tensor([0, count])
    else:
        lengths, offsets = _evenly(count, bags, ids.device)
    return KeyedJaggedTensor(
        keys=[ENTITY],
        values=ids,
        lengths=lengths,
        offsets=offsets,
        stride=bags,
        # Otherwise TorchRec copies them from the device, and waits.
        length_per_key=[count],
        offset_per_key=[0, count],
    )


@lru_cache(maxsize=4)  # batches of one size have them in common; a GPU would start 5 kernels
def _evenly(count: int, bags: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lengths (bags,) and offsets (bags + 1,) of bags that share ``count`` ids evenly."""
    lengths = torch.full((bags,), count // bags, dtype=torch.int64, device=device)
    lengths[: count % bags] += 1
    offsets = lengths.new_zeros(bags + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return lengths, offsets


def table_of(sharded_model: nn.Module, tables: Sequence[EntityTable]) -> TableShard:
    """Return this rank's rows of a sharded model."""
    kernel = kernel_of(sharded_model)
    shard: TableShard | None = getattr(kernel, "shard", None)
    return FbgemmShard(kernel, tables) if shard is None else shard


def kernel_of(sharded_model: nn.Module) -> Any:
    """Return the compute kernel of the table: one of this file, or TorchRec's."""
    modules = sharded_model.modules()
    collection = next(m for m in modules if isinstance(m, ShardedEmbeddingCollection))
    (lookup,) = collection._lookups
    return next(m for m in lookup.modules() if isinstance(m, BaseBatchedEmbedding))


class CpuFusedTable(BaseBatchedEmbedding[Tensor], FusedOptimizerModule):
    """A compute kernel of TorchRec that looks up and steps the rows of a ``TableShard``.

    It steps with its optimizer, not in backward.  Lookups between steps, as in ranking, change
    nothing; FBGEMM counts each as an iteration.
    """

    def __init__(
        self, config: GroupedEmbeddingConfig, pg: dist.ProcessGroup | None, shard: TableShard
    ) -> None:
        super().__init__(config, pg)
        self.shard = shard
        self._weight = nn.Parameter(shard.rows)
        self._optimizer = _ShardOptimizer(f"{ENTITY}.weight", self._weight, shard)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows (M, D) of the local ids (M,)."""
        return self.shard.lookup(features.values())

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._optimizer

    @property
    def emb_module(self) -> Any:
        return self  # there is no table of FBGEMM's

    def split_embedding_weights(self) -> list[Tensor]:
        return [self.shard.rows]

    def named_parameters_by_table(self) -> Iterator[tuple[str, Any]]:
        yield ENTITY, self._weight

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield f"{prefix}.{ENTITY}.weight".removeprefix("."), self._weight


class _ShardOptimizer(FusedOptimizer):
    """Steps a ``TableShard``; its parameter groups are those of the shard."""

    def __init__(self, name: str, weight: nn.Parameter, shard: TableShard) -> None:
        super().__init__({name: weight}, {}, shard.param_groups)
        self._shard = shard

    def zero_grad(self, set_to_none: bool = False) -> None:
        self._shard.zero_grad()

    def step(self, closure: Any = None) -> None:
        self._shard.step()


class FbgemmShard(TableShard):
    """The rows of FBGEMM's table.

    Args:
        kernel: TorchRec's kernel around it.
        tables: The table of all entities.
    """

    def __init__(self, kernel: BatchedFusedEmbedding, tables: Sequence[EntityTable]):
        self._kernel, (table,) = kernel, kernel.config.embedding_tables
        optimizer = FbgemmRows(kernel.emb_module)
        self.is_deferred = isinstance(kernel, DeferredEmbedding)
        super().__init__(tables, optimizer.rows, table.local_metadata.shard_offsets[0], [optimizer])
        if table.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING:
            self.in_main_memory = True
            self.read = partial(read_rows, kernel.emb_module)

    def shard(self) -> EntityShard:
        """Return a view of the rows.

        Cached rows on the GPU are first written back and dropped, so the view may be read and
        written until the next lookup.
        """
        self._kernel.flush()
        self._kernel.purge()
        return super().shard()


class FbgemmRows:
    """FBGEMM's table as the optimizer of a ``TableShard``.

    Attributes:
        rows: (n, D), a view.
        states: By name, as in a checkpoint.
        lr: Not used: TorchRec passes the learning rate to the table.
    """

    lr = 0.0

    def __init__(self, table: SplitTableBatchedEmbeddingBagsCodegen):
        self._table = table
        (rows,) = table.split_embedding_weights()
        self.rows = rows.detach()

    @property
    def states(self) -> dict[str, Tensor]:
        (states,) = self._table.get_optimizer_state() or [{}]
        names = ["momentum1", *list(states)[1:]]
        return dict(zip(names, states.values(), strict=False))

    @property
    def steps(self) -> int:
        """The number of steps that FBGEMM has counted."""
        # FBGEMM corrects Adam's bias by the copy on the host; reading it does not synchronize.
        return int(self._table.iter_cpu.item() or self._table.iter.item())

    @steps.setter
    def steps(self, steps: int) -> None:
        self._table.iter.fill_(steps)
        self._table.iter_cpu.fill_(steps)

    def count(self, has_rows: bool) -> None:
        """Count one step."""
        self.steps += 1

    def step_part(self, gradients: RowGradients) -> None:
        """Take a part of the step that was counted last; its parts have no row in common."""
        if not gradients.ids.numel():
            return
        step = self.steps
        self.steps = step - 1  # FBGEMM counts every lookup as a step
        with torch.enable_grad():
            rows = self._table(indices=gradients.ids, offsets=_bags(gradients.ids))
        rows.backward(gradients.grad.to(rows.dtype))
        self.steps = step


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


class DeferredEmbedding(BatchedFusedEmbedding):
    """TorchRec's kernel around FBGEMM's table, with gradients kept for the optimizer's step.

    All gradients since the last step form one sum, so accumulating, clipping and scaling are exact.
    The cost is (M, D) elements of memory and one more pass over the rows of a batch.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        tables: Sequence[EntityTable],
    ) -> None:
        super().__init__(config, pg, device)
        self.shard = FbgemmShard(self, tables)
        self._optim = DeferredOptimizer(config, self.emb_module, pg, self.shard)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows (M, D) of the local ids (M,)."""
        return self.shard.lookup(features.values())


class DeferredOptimizer(EmbeddingFusedOptimizer):
    """The optimizer of a ``DeferredEmbedding``."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        table: nn.Module,
        pg: dist.ProcessGroup | None,
        shard: TableShard,
    ) -> None:
        super().__init__(config, table, pg)
        self._shard = shard

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)
        self._shard.zero_grad()

    def step(self, closure: Any = None) -> None:
        super().step(closure)  # passes the learning rate to the table
        self._shard.step()
