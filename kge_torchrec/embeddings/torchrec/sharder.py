"""TorchRec's row-wise sharding with our own compute kernels.

TorchRec's input distribution, lookup and output distribution run unchanged.  It builds the compute
kernel of a table at the end of a chain of factories; each class here overrides one link:

    EmbeddingCollectionSharder -> ShardedEmbeddingCollection -> RwSequenceEmbeddingSharding
        -> GroupedEmbeddingsLookup -> the kernel, see ``collection``

tests/embeddings/test_torchrec.py lists the private names of TorchRec and says what each is for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpSparseFeaturesDist
from torchrec.distributed.sharding.rw_sequence_sharding import (
    RwSequenceEmbeddingDist,
    RwSequenceEmbeddingSharding,
)
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, ShardingType

from kge_torchrec.embeddings.optimizers import RowwiseAdagrad
from kge_torchrec.embeddings.shard import EntityTable, TableShard
from kge_torchrec.embeddings.torchrec.collection import CpuFusedTable, DeferredEmbedding

if TYPE_CHECKING:
    from torchrec import EmbeddingCollection
    from torchrec.distributed.embedding_sharding import EmbeddingSharding
    from torchrec.distributed.types import ParameterSharding, ShardingEnv

_OURS = "kge_torchrec"


@dataclass(frozen=True)
class TableSettings:
    """Our own settings on their way from the sharder to the kernel.

    Attributes:
        tables: The entity tables, which TorchRec sees as a single one.
        deferred: Whether FBGEMM's table steps with its optimizer instead of inside backward.
    """

    tables: tuple[EntityTable, ...]
    deferred: bool = False


def fused_params(tables: Sequence[EntityTable], deferred: bool = False) -> dict[str, Any]:
    """Return the value of ``EmbeddingCollectionSharder(fused_params=...)``.

    TorchRec passes it on to the kernel.  The keys are FBGEMM's, besides one for TableSettings.
    """
    optimizer = tables[0].optimizer
    params: dict[str, Any] = {
        _OURS: TableSettings(tuple(tables), deferred),
        # A placeholder where FBGEMM does not have the optimizer.
        "optimizer": EmbOptimType[optimizer.fbgemm or "EXACT_SGD"],
        "learning_rate": optimizer.lr,
    }
    if optimizer.fbgemm:
        options = ("beta1", "beta2", "eps", "weight_decay")
        params |= {name: value for name, value in vars(optimizer).items() if name in options}
    if isinstance(optimizer, RowwiseAdagrad) and optimizer.weight_decay:
        # FBGEMM ignores weight_decay for this optimizer unless the mode is set.
        params["weight_decay_mode"] = WeightDecayMode.L2
    return params


class EntitySharder(EmbeddingCollectionSharder):
    """Shards the collection of the entity table by rows.

    The arguments are those of EmbeddingCollectionSharder, with ``fused_params`` made by the
    function ``fused_params``.
    """

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        return _EntityCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingCollection]:
        return _EntityCollection


class _EntityCollection(ShardedEmbeddingCollection):
    @classmethod
    def create_embedding_sharding(
        cls, sharding_type: str, *args: Any, **kwargs: Any
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        assert sharding_type == ShardingType.ROW_WISE.value  # the only one that is planned
        return _RowWiseSharding(*args, **kwargs)


class _RowWiseSharding(RwSequenceEmbeddingSharding):
    def create_lookup(
        self, device: torch.device | None = None, *args: Any, **kwargs: Any
    ) -> GroupedEmbeddingsLookup:
        device = self._device if device is None else device
        return _Lookup(self._grouped_embedding_configs, self._pg, device, self._env)

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        if self._env.world_size == 1:
            return DpSparseFeaturesDist()
        return super().create_input_dist(device)

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> DpSequenceEmbeddingDist | RwSequenceEmbeddingDist:
        if self._env.world_size == 1:
            return DpSequenceEmbeddingDist()
        device = self._device if device is None else device
        if not skips_permutation(device):
            return super().create_output_dist(device)
        codecs = self.qcomm_codecs_registry
        return _OrderedOutputDist(self._pg, 1, device, qcomm_codecs_registry=codecs)


def skips_permutation(device: torch.device) -> bool:
    """Return whether rows stay in the order in which they arrive, which is that of the ids."""
    return device.type == "cuda"


class _OrderedOutputDist(RwSequenceEmbeddingDist):
    """Skips the final permutation of rows, for ascending ids.

    Grouping ascending ids by rank keeps their order, so the rows arrive in order.  The permutation
    would cost as much time as the optimizer step.
    """

    def forward(
        self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None
    ) -> Awaitable[Tensor]:
        assert sharding_ctx is not None  # TorchRec always passes one here
        sharding_ctx = copy.copy(sharding_ctx)
        sharding_ctx.unbucketize_permute_tensor = None
        return super().forward(local_embs, sharding_ctx)


class _Lookup(GroupedEmbeddingsLookup):
    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        *args: Any,
        **kwargs: Any,
    ) -> BaseBatchedEmbedding:
        assert config.fused_params is not None and device is not None
        ours: TableSettings = config.fused_params.pop(_OURS)  # FBGEMM's table must not get them
        if uses_own_table(device, ours.tables):
            (table,) = config.embedding_tables
            first = table.local_metadata.shard_offsets[0]
            ids = range(first, first + table.local_rows)
            return CpuFusedTable(
                config, pg, TableShard.of(ours.tables, table.local_cols, ids, device)
            )
        if ours.deferred:
            return DeferredEmbedding(config, pg, device, ours.tables)
        return super()._create_embedding_kernel(config, pg, device, *args, **kwargs)


def uses_own_table(device: torch.device, tables: Sequence[EntityTable]) -> bool:
    """Return whether the rows are not in FBGEMM's table.

    On CPUs FBGEMM has no Adam, and its table has one optimizer for all rows.
    """
    return device.type == "cpu" or len(tables) > 1
