"""A sharded entity table on this rank, for the tests of tables, planner and initial values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from kge_torchrec.embeddings.backend import ENTITY
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import RowOptimizer
from kge_torchrec.embeddings.shard import EntityTable, TableShard
from kge_torchrec.embeddings.torchrec.collection import as_feature, entity_collection, table_of
from kge_torchrec.embeddings.torchrec.planner import MODULE, Ranks, plan_rows
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder, fused_params


class TableModel(nn.Module):
    """Nothing but the entity table."""

    def __init__(self, num_entities: int, dim: int) -> None:
        super().__init__()
        self.entities = entity_collection(num_entities, dim)

    def forward(self, ids: Tensor | KeyedJaggedTensor) -> Tensor:
        feature = as_feature(ids) if isinstance(ids, Tensor) else ids
        return self.entities(feature)[ENTITY].values()


def sharded_table(
    num_entities: int,
    dim: int,
    optimizer: RowOptimizer,
    values: Tensor | None = None,
    deferred: bool = False,
    device: str = "cpu",
) -> DistributedModelParallel:
    """The table (N, D) sharded over this world, with ``values`` (N, D) if given."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    tables = [EntityTable.of_all(num_entities, optimizer, EntityInit())]
    sharder = EntitySharder(fused_params(tables, deferred))
    model = TableModel(num_entities, dim)
    ranks = Ranks(world_size, world_size, device)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv(world_size, rank, dist.group.WORLD, output_dtensor=True),
        device=torch.device(device),
        plan=plan_rows(getattr(model, MODULE), sharder, tables, ranks),
        sharders=[sharder],
    )
    sharded.tables = tables
    if values is not None:
        shard = own_rows(sharded).shard()
        shard.rows.copy_(values[slice(*shard.row_range)])
    return sharded


def own_rows(model: nn.Module) -> TableShard:
    """This rank's rows of a table that ``sharded_table`` made."""
    return table_of(model, model.tables)
