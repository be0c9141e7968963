"""TorchRec's row-wise sharding with the CPU table put in where FBGEMM has no kernel.

TorchRec builds a table's kernel at the end of a chain of factories; each class here overrides one
link.  On CUDA nothing changes.

    EmbeddingCollectionSharder -> ShardedEmbeddingCollection -> RwSequenceEmbeddingSharding
        -> GroupedEmbeddingsLookup -> BatchedFusedEmbedding -> CpuFusedTable
        -> RwSequenceEmbeddingDist
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BatchedFusedEmbedding,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.sharding.rw_sequence_sharding import (
    RwSequenceEmbeddingDist,
    RwSequenceEmbeddingSharding,
)
from torchrec.distributed.types import ShardingType
from torchrec.types import DataType

from kge_torchrec.entities.contract import ENTITY
from kge_torchrec.entities.row_update import is_identity
from kge_torchrec.entities.torchrec.cpu_table import CpuFusedTable
from kge_torchrec.entities.torchrec.fused_params import from_fused_params


class _CpuFusedEmbedding(BatchedFusedEmbedding):
    def __init__(self, config: GroupedEmbeddingConfig, pg=None, device=None) -> None:
        # Not BatchedFusedEmbedding's own __init__, which would build FBGEMM's table.
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        _check(config)
        optimizer = from_fused_params(config.fused_params or {})
        self._emb_module = CpuFusedTable(self._local_rows[0], self._local_cols[0], optimizer)
        self._optim = _FusedOptimizer(config, self._emb_module, pg)
        self.init_parameters()


class _FusedOptimizer(EmbeddingFusedOptimizer):
    """Steps the table when it is stepped itself.

    TorchRec takes a second state of one number for a scalar of the whole shard.  On a rank with a
    single row that is wrong for rowwise_adam's second moment, and no checkpoint could be written.
    A first state is never taken for that, so the state is described as one.
    """

    def __init__(self, config: GroupedEmbeddingConfig, table: CpuFusedTable, pg) -> None:
        super().__init__(config, table, pg)
        self._table = table
        for states in table.get_optimizer_state():
            for name, state in list(states.items())[1:]:
                if state.numel() == 1:
                    alone = EmbeddingFusedOptimizer(
                        config, table, pg, all_optimizer_states=[{name: state}]
                    )
                    (described,) = next(iter(alone.state.values())).values()
                    next(iter(self.state.values()))[f"{ENTITY}.{name}"] = described

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)
        self._table.zero_grad()

    def step(self, closure: Any = None) -> None:
        super().step(closure)  # gives the table its learning rate
        self._table.step()


def _check(config: GroupedEmbeddingConfig) -> None:
    if len(config.embedding_tables) != 1:
        names = ", ".join(table.name for table in config.embedding_tables)
        raise ValueError(f"the CPU table holds one table, not several ({names})")
    if config.data_type != DataType.FP32:
        raise ValueError(
            f"the CPU table holds float32 numbers, not {config.data_type.value}; "
            "16-bit tables run on CUDA only"
        )


class _Lookup(GroupedEmbeddingsLookup):
    def _create_embedding_kernel(self, config, pg, device, *args, **kwargs):
        on_cpu = device is None or device.type == "cpu"
        if on_cpu and config.compute_kernel == EmbeddingComputeKernel.FUSED:
            return _CpuFusedEmbedding(config, pg, device)
        return super()._create_embedding_kernel(config, pg, device, *args, **kwargs)


class _RowWiseSharding(RwSequenceEmbeddingSharding):
    def create_lookup(self, device=None, fused_params=None, feature_processor=None):
        return _Lookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
        )

    def create_output_dist(self, device=None):
        return _OutputDist(
            self._pg,
            self._get_num_features(),
            device if device is not None else self._device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
        )


class _OutputDist(RwSequenceEmbeddingDist):
    """Leaves out the final permutation of rows where it changes nothing.

    Ids that arrive sorted are still in order once they are grouped by rank, so their rows come
    back in order; permuting them anyway costs as much as the optimizer step.  On CUDA looking
    would stop the host, and the permutation is cheap.
    """

    def forward(self, local_embs, sharding_ctx=None):
        order = sharding_ctx.unbucketize_permute_tensor
        if order is not None and order.device.type == "cpu" and is_identity(order.numpy()):
            sharding_ctx = copy.copy(sharding_ctx)
            sharding_ctx.unbucketize_permute_tensor = None
        return super().forward(local_embs, sharding_ctx)


class _ShardedEntityCollection(ShardedEmbeddingCollection):
    @classmethod
    def create_embedding_sharding(
        cls, sharding_type, sharding_infos, env, device=None, qcomm_codecs_registry=None
    ):
        if sharding_type != ShardingType.ROW_WISE.value:
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        return _RowWiseSharding(
            sharding_infos=sharding_infos,
            env=env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )


class EntitySharder(EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection by rows: FBGEMM's table on CUDA, CpuFusedTable on CPU.

    Args as EmbeddingCollectionSharder; ``fused_params`` from fused_params(table_optimizer).
    """

    def shard(
        self, module, params, env, device: torch.device | None = None, module_fqn: str | None = None
    ) -> ShardedEmbeddingCollection:
        return _ShardedEntityCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self):
        return _ShardedEntityCollection
