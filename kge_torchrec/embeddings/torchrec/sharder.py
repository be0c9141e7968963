"""TorchRec's row-wise sharding with our own kernels and exchanges.

TorchRec builds the kernel of a table and the exchange of ids and rows at the end of a chain of
factories.  Each class here overrides one link:

    EmbeddingCollectionSharder -> ShardedEmbeddingCollection -> RwSequenceEmbeddingSharding
        -> GroupedEmbeddingsLookup -> BatchedFusedEmbedding: CpuFusedTable on CPU, and
           DeferredEmbedding on CUDA if the step must not happen in backward
        -> RwSparseFeaturesDist, RwSequenceEmbeddingDist: no exchange on a single rank, a direct
           one on CPU

Their settings, such as the ``TableOptimizer``, are passed in one dictionary, ``fused_params``.

TorchRec supports any number of features: it sorts ids into buckets, sends the counts per bucket and
per bag, and permutes the results by feature and rank.  Ascending ids of one feature are already
grouped by owner.  The direct exchange needs one collective each for counts, ids, rows and
gradients.  TorchRec's objects, logging and permutations took a twelfth of a 20 ms step.

Shapes: N rows of the table, W ranks, M ids of this rank's batch, R ids requested from this rank, D
elements per row.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BatchedFusedEmbedding,
)
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpSparseFeaturesDist
from torchrec.distributed.sharding.rw_sequence_sharding import (
    RwSequenceEmbeddingDist,
    RwSequenceEmbeddingSharding,
)
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, NoWait, ShardingType

from kge_torchrec.embeddings.backend import ENTITY
from kge_torchrec.embeddings.exchange import exchanged
from kge_torchrec.embeddings.torchrec.collection import CpuFusedEmbedding, DeferredEmbedding
from kge_torchrec.embeddings.torchrec.settings import (
    of_fbgemm,
    of_table,
    settings_of,
)

if TYPE_CHECKING:
    from torchrec import EmbeddingCollection
    from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
    from torchrec.distributed.types import ParameterSharding, ShardingEnv

    from kge_torchrec.embeddings.row_gradients import TableBlock


class _Lookup(GroupedEmbeddingsLookup):
    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        *args: Any,
        **kwargs: Any,
    ) -> BaseBatchedEmbedding:
        kernel, params = None, config.fused_params
        if config.compute_kernel == EmbeddingComputeKernel.FUSED:
            on_cpu = device is None or device.type == "cpu"
            kernel = kernel_of(on_cpu, settings_of(params).deferred)
        if kernel is CpuFusedEmbedding:
            return kernel(config, pg, device)
        config = replace(config, fused_params=of_fbgemm(params))
        if kernel is DeferredEmbedding:
            return kernel(config, pg, device, settings_of(params).block)
        return super()._create_embedding_kernel(config, pg, device, *args, **kwargs)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        block = settings_of(self.grouped_configs[0].fused_params).block
        if block is None:
            return super().forward(sparse_features)
        return block.lookup(sparse_features.values())


def kernel_of(on_cpu: bool, deferred: bool) -> type[BatchedFusedEmbedding] | None:
    """Return the kernel class of a fused table; None means TorchRec's own."""
    if on_cpu:
        return CpuFusedEmbedding
    return DeferredEmbedding if deferred else None


class _RowWiseSharding(RwSequenceEmbeddingSharding):
    """Row-wise sharding of one table, or of several that are exchanged as one.

    The rows of a rank are one block of ids, of one table or of several.  So the exchange sees one
    feature, ENTITY, of all rows.
    """

    def _get_num_features(self) -> int:
        return 1

    def _get_feature_hash_sizes(self) -> list[int]:
        return [sum(super()._get_feature_hash_sizes())]

    def _get_virtual_table_feature_num_buckets(self) -> Any:
        usual: Any = super()._get_virtual_table_feature_num_buckets()
        counts = [self._world_size]
        return (counts, *usual[1:]) if isinstance(usual, tuple) else counts  # a pair in 1.6

    def feature_names(self) -> list[str]:
        return [ENTITY]

    def embedding_names(self) -> list[str]:
        return [ENTITY]

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
            return DirectInputDist(self._pg, rows, self._exchange_dtype)
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
        made = kind(
            self._pg,
            self._get_num_features(),
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
        )
        made.exchange_dtype = self._exchange_dtype
        return made

    @property
    def _exchange_dtype(self) -> str:
        return settings_of(self._grouped_embedding_configs[0].fused_params).exchange_dtype

    def _ascends(self) -> bool:
        groups = self._grouped_embedding_configs
        return all(settings_of(group.fused_params).ascending_ids for group in groups)

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
        for info in sharding_infos:
            info.fused_params = of_table(info.fused_params, info.embedding_config.name)
        return _RowWiseSharding(
            sharding_infos=sharding_infos,
            env=env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )

    def forward(self, *features: KeyedJaggedTensor) -> Any:
        """Look up rows like TorchRec, with shortcuts for one feature.

        A single rank exchanges nothing.  On CPU, ascending ids use DirectInputDist.  TorchRec's
        pipeline replaces this method with its own.
        """
        kernel, (ids,) = self._lookups[0]._emb_modules[0], features
        block: TableBlock | None = getattr(kernel, "block", None)
        if self._env.world_size == 1:
            rows = kernel(ids) if block is None else block.lookup(ids.values())
        elif isinstance(kernel, CpuFusedEmbedding) and self._direct is not None:
            request = self._direct(ids).wait()
            rows = request.exchange_rows(kernel.block.lookup(request.wait().values()))
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


class DirectInputDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Sends ids (M,), ascending and in one bag, to their owners as local row numbers.

    Args:
        group: The ranks.
        num_rows: N.  Every rank has ceil(N / W) rows, except the last ones, as in TorchRec.
        exchange_dtype: What rows and gradients travel as.
    """

    def __init__(self, group: dist.ProcessGroup, num_rows: int, exchange_dtype: str = "fp32"):
        super().__init__()
        self._exchange_dtype = exchange_dtype
        self._group, size = group, -(-num_rows // group.size())
        self._starts = torch.arange(1, group.size()) * size
        self._first_row = group.rank() * size

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:
        ids = sparse_features.values()
        ends = torch.searchsorted(ids, self._starts)
        none, count = ends.new_zeros(1), ends.new_full((1,), len(ids))
        return _Counts(ids, torch.diff(ends, prepend=none, append=count), self)


class _Counts(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """The running exchange of the number of ids for each rank."""

    def __init__(self, ids: Tensor, counts: Tensor, way: DirectInputDist):
        super().__init__()
        self._ids, self._counts, self._way = ids, counts, way
        self._requested = torch.empty_like(counts)
        self._work = dist.all_to_all_single(
            self._requested, counts, group=way._group, async_op=True
        )

    def _wait_impl(self) -> _Ids:
        self._work.wait()
        return _Ids(self._ids, self._counts.tolist(), self._requested.tolist(), self._way)


class _Ids(KJTAllToAllTensorsAwaitable):
    """The running exchange of ids.

    TorchRec reads the split sizes of its base class, so this class sets them.
    """

    def __init__(self, ids: Tensor, send: list[int], receive: list[int], way: DirectInputDist):
        Awaitable.__init__(self)  # skips the base class's __init__, which would send lengths
        self._input_splits, self._output_splits = {"values": send}, {"values": receive}
        self._recat, self._stride_per_rank = None, None
        self._first_row, self._group, self._sent = way._first_row, way._group, ids
        self._exchange_dtype = way._exchange_dtype
        self._requested = ids.new_empty(sum(receive))
        self._work = dist.all_to_all_single(
            self._requested, ids, receive, send, group=way._group, async_op=True
        )

    def _wait_impl(self) -> KeyedJaggedTensor:
        self._work.wait()
        rows = self._requested.sub_(self._first_row)
        count = len(rows)
        return KeyedJaggedTensor(
            [ENTITY], rows, lengths=torch.tensor([count]), stride=1,
            length_per_key=[count], offset_per_key=[0, count],
        )  # fmt: skip

    def exchange_rows(self, rows: Tensor) -> Tensor:
        """Send the requested rows (R, D) and return the rows (M, D) of this rank's ids."""
        send, receive = self._output_splits["values"], self._input_splits["values"]
        return _ExchangeRows.apply(rows, self._group, send, receive, self._exchange_dtype)


class DirectOutputDist(RwSequenceEmbeddingDist):
    """Sends rows to the ranks that requested them, and gradients back, on CPU for ascending ids.

    TorchRec also permutes both by feature and rank, which for a single feature is a plain copy.
    """

    exchange_dtype = "fp32"

    def forward(
        self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None
    ) -> Awaitable[Tensor]:
        assert sharding_ctx is not None  # TorchRec always passes one here
        sizes = sharding_ctx.output_splits, sharding_ctx.input_splits
        pg, dtype = self._dist._pg, self.exchange_dtype
        return NoWait(_ExchangeRows.apply(local_embs, pg, *sizes, dtype))


class _ExchangeRows(torch.autograd.Function):
    """Exchanges rows: (R, D) grouped by ``send`` sizes -> (M, D) grouped by ``receive`` sizes."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: dist.ProcessGroup,
        send: list[int],
        receive: list[int],
        dtype: str,
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive, ctx.dtype = group, send, receive, dtype
        return exchanged(rows, send, receive, group, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        sizes = ctx.receive, ctx.send
        arrived = exchanged(grad.contiguous(), *sizes, ctx.group, ctx.dtype, gradients=True)
        if get_gradient_division():
            arrived.div_(dist.get_world_size(ctx.group))
        return arrived, None, None, None, None
