"""TorchRec's row-wise sharding with our own kernels and exchanges.

TorchRec builds the kernel of a table and the exchange of ids and rows at the end of a chain of
factories.  Each class here overrides one link:

    EmbeddingCollectionSharder -> ShardedEmbeddingCollection -> RwSequenceEmbeddingSharding
        -> GroupedEmbeddingsLookup -> BatchedFusedEmbedding: CpuFusedTable on CPU, and
           DeferredEmbedding on CUDA if the step must not happen in backward
        -> RwSparseFeaturesDist, RwSequenceEmbeddingDist: no exchange on a single rank

Their settings, such as the ``TableOptimizer``, are passed in one dictionary, ``fused_params``.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec import JaggedTensor
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BatchedFusedEmbedding,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpSparseFeaturesDist
from torchrec.distributed.sharding.rw_sequence_sharding import (
    RwSequenceEmbeddingDist,
    RwSequenceEmbeddingSharding,
)
from torchrec.distributed.types import ShardingType
from torchrec.types import DataType

from kge_torchrec.embeddings.backend import ENTITY
from kge_torchrec.embeddings.optimizers import TABLE_OPTIMIZERS, TableOptimizer, optimizer_class
from kge_torchrec.embeddings.torchrec.collection import DeferredEmbedding
from kge_torchrec.embeddings.torchrec.cpu_table import CpuFusedTable
from kge_torchrec.embeddings.torchrec.direct import DirectInputDist, DirectOutputDist

if TYPE_CHECKING:
    from torch import Tensor
    from torchrec import EmbeddingCollection, KeyedJaggedTensor
    from torchrec.distributed.embedding_sharding import (
        BaseSparseFeaturesDist,
        EmbeddingSharding,
        EmbeddingShardingInfo,
    )
    from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
    from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv


class _CpuFusedEmbedding(BatchedFusedEmbedding):
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
        self._optim = _FusedOptimizer(config, self._emb_module, pg)
        self.pending = self._emb_module.pending
        self.init_parameters()


class _FusedOptimizer(EmbeddingFusedOptimizer):
    """An optimizer whose ``step`` steps the CPU table."""

    def __init__(
        self, config: GroupedEmbeddingConfig, table: CpuFusedTable, pg: dist.ProcessGroup | None
    ) -> None:
        super().__init__(config, table, pg)
        self._table = table

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)
        self._table.zero_grad()

    def step(self, closure: Any = None) -> None:
        super().step(closure)  # passes the learning rate to the table
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


def _describe_single_row(
    kernel: BatchedFusedEmbedding, config: GroupedEmbeddingConfig, pg: dist.ProcessGroup | None
) -> None:
    """Correct TorchRec's description of the optimizer state of a shard with a single row.

    TorchRec treats a second state with one element as a scalar of the whole shard.  This is wrong
    for the second moment of rowwise_adam, and saving a checkpoint would fail.  TorchRec never
    treats a first state as a scalar, so each such state is described as a first one.
    """
    table, optimizer = kernel.emb_module, kernel.fused_optimizer
    for states in table.get_optimizer_state():
        for name, state in list(states.items())[1:]:
            if state.numel() == 1:
                as_first = EmbeddingFusedOptimizer(
                    config, table, pg, all_optimizer_states=[{name: state}]
                )
                (described,) = next(iter(as_first.state.values())).values()
                next(iter(optimizer.state.values()))[f"{ENTITY}.{name}"] = described


class _Lookup(GroupedEmbeddingsLookup):
    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        *args: Any,
        **kwargs: Any,
    ) -> BaseBatchedEmbedding:
        kernel = None
        if config.compute_kernel == EmbeddingComputeKernel.FUSED:
            on_cpu = device is None or device.type == "cpu"
            kernel = kernel_of(on_cpu, is_deferred(config.fused_params))
        if kernel is not _CpuFusedEmbedding:
            config = replace(config, fused_params=of_fbgemm(config.fused_params))
        if kernel is None:
            made = super()._create_embedding_kernel(config, pg, device, *args, **kwargs)
        else:
            made = kernel(config, pg, device)
        if isinstance(made, BatchedFusedEmbedding):
            _describe_single_row(made, config, pg)
        return made


def kernel_of(on_cpu: bool, deferred: bool) -> type[BatchedFusedEmbedding] | None:
    """Return the kernel class of a fused table; None means TorchRec's own."""
    if on_cpu:
        return _CpuFusedEmbedding
    return DeferredEmbedding if deferred else None


class _RowWiseSharding(RwSequenceEmbeddingSharding):
    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> GroupedEmbeddingsLookup:
        return _Lookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
        )

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        if self._world_size == 1:
            return DpSparseFeaturesDist()
        device = device if device is not None else self._device
        if self._goes_directly(device):
            (rows,) = self._get_feature_hash_sizes()
            return DirectInputDist(self._pg, rows)
        return super().create_input_dist(device)

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> DpSequenceEmbeddingDist | RwSequenceEmbeddingDist:
        if self._world_size == 1:
            return DpSequenceEmbeddingDist()
        device = device if device is not None else self._device
        kind = RwSequenceEmbeddingDist
        if self._goes_directly(device):
            kind = DirectOutputDist
        elif self._ascends():
            kind = _OrderedOutputDist
        return kind(
            self._pg,
            self._get_num_features(),
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
        )

    def _ascends(self) -> bool:
        return all(has_ascending_ids(c.fused_params) for c in self._grouped_embedding_configs)

    def _goes_directly(self, device: torch.device | None) -> bool:
        return self._ascends() and (device is None or device.type == "cpu")


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


class _ShardedEntityCollection(ShardedEmbeddingCollection):
    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
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

    def forward(self, *features: KeyedJaggedTensor) -> Any:
        """Look up rows like TorchRec, with shortcuts for a single table and feature.

        A single rank exchanges nothing.  On CPU, ascending ids use DirectInputDist.  TorchRec's
        pipeline replaces this method with its own.
        """
        (kernel,), (ids,) = self._lookups[0]._emb_modules, features
        is_ours = isinstance(kernel, _CpuFusedEmbedding)
        if self._env.world_size == 1:
            rows = kernel.emb_module(ids.values()) if is_ours else kernel(ids)
        elif is_ours and self._direct is not None:
            request = self._direct(ids).wait()
            rows = request.exchange_rows(kernel.emb_module(request.wait().values()))
        else:
            return super().forward(*features)
        return {ENTITY: JaggedTensor(rows, lengths=ids.lengths())}

    @cached_property
    def _direct(self) -> DirectInputDist | None:
        """The direct exchange of ids between several ranks, or None if it does not apply."""
        (sharding,) = self._sharding_type_to_sharding.values()
        exchange = sharding.create_input_dist(self._device)
        return exchange if isinstance(exchange, DirectInputDist) else None


class EntitySharder(EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection by rows: FBGEMM's table on CUDA, CpuFusedTable on CPU.

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
    def sharded_module_type(self) -> type[_ShardedEntityCollection]:
        return _ShardedEntityCollection


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
