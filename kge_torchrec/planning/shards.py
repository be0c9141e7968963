"""The table's shards, to and from TorchRec's ShardingPlan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from kge_torchrec.data.batches import ENTITY

MODULE = "entities"  # where the model holds its EmbeddingCollection


@dataclass(frozen=True)
class Shard:
    """A block of the table on one rank."""

    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


def shards_of(plan: ShardingPlan, num_entities: int, dim: int) -> list[Shard]:
    """The shards of a plan's entity table, by rank; a data-parallel table is whole on each rank."""
    (tables,) = plan.plan.values()
    table = tables[ENTITY]
    if table.sharding_spec is None:
        return [Shard(rank, 0, num_entities, 0, dim) for rank in table.ranks]
    shards = [
        Shard(
            rank,
            first_row=shard.shard_offsets[0],
            rows=shard.shard_sizes[0],
            first_column=shard.shard_offsets[1],
            columns=shard.shard_sizes[1],
        )
        for rank, shard in zip(table.ranks, table.sharding_spec.shards, strict=True)
    ]
    return sorted(shards, key=lambda shard: (shard.rank, shard.first_row, shard.first_column))


def sharding_plan(
    shards: Sequence[Shard],
    sharding: str,
    kernel: str,
    device_type: str,
    local_world_size: int,
    cache_ratio: float = 0.0,
) -> ShardingPlan:
    """The inverse of ``shards_of``, as DistributedModelParallel takes it."""
    spec = None
    if sharding != "data_parallel":
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[shard.first_row, shard.first_column],
                    shard_sizes=[shard.rows, shard.columns],
                    placement=placement(device_type, shard.rank, local_world_size),
                )
                for shard in shards
            ]
        )
    table = ParameterSharding(
        sharding_type=sharding,
        compute_kernel=kernel,
        ranks=[shard.rank for shard in shards],
        sharding_spec=spec,
        cache_params=CacheParams(load_factor=cache_ratio) if cache_ratio else None,
    )
    return ShardingPlan({MODULE: EmbeddingModuleShardingPlan({ENTITY: table})})
