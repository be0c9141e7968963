"""A sharded entity table on this rank, for the tests of tables, planner and initial values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from kge_torchrec.embeddings.backend import ENTITY
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.torchrec.collection import entity_collection, entity_shard
from kge_torchrec.embeddings.torchrec.feature import as_feature
from kge_torchrec.embeddings.torchrec.planner import Ranks, plan_row_wise
from kge_torchrec.embeddings.torchrec.settings import fused_params
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder


class TableModel(nn.Module):
    """Nothing but the entity table."""

    def __init__(self, num_entities: int, dim: int) -> None:
        super().__init__()
        self.table = entity_collection(num_entities, dim)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(as_feature(ids))[ENTITY].values()


def sharded_table(
    num_entities: int, dim: int, optimizer: TableOptimizer, values: Tensor | None = None
) -> DistributedModelParallel:
    """The table (N, D) sharded over this world, with ``values`` (N, D) if given."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    sharder = EntitySharder(fused_params=fused_params(optimizer))
    model = TableModel(num_entities, dim)
    group = dist.group.WORLD
    model = DistributedModelParallel(
        model,
        env=ShardingEnv(world_size, rank, group, output_dtensor=True),
        device=torch.device("cpu"),
        plan=plan_row_wise(model, sharder, Ranks(world_size, world_size, "cpu")),
        sharders=[sharder],
    )
    if values is not None:
        shard = entity_shard(model)
        shard.rows.copy_(values[slice(*shard.row_range)])
    return model
