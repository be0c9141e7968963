"""The plan of several entity tables: each rank holds one block of consecutive ids.

TorchRec's planner would split each table over all ranks.  Here the tables are split as if they were
one, so a rank may hold no row of a table.  Every rank has as many rows as with a single table, and
one exchange serves all tables.

Shapes: N entities, D elements per row, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from kge_torchrec.distributed.processes import rows_by_rank
from kge_torchrec.embeddings.tables import EntityTable
from kge_torchrec.embeddings.torchrec.planner import (
    MODULE,
    Bytes,
    PlanDoesNotFit,
    Ranks,
    TableForm,
    amount,
    check_cuda_dim,
    plan_row_wise,
    table_memory,
)


def plan_tables(
    model: nn.Module,
    sharder: EmbeddingCollectionSharder,
    ranks: Ranks,
    tables: Sequence[EntityTable],
    dim: int,
    **options: Any,
) -> ShardingPlan:
    """Return the row-wise plan of the tables; that of TorchRec's planner for a single one.

    Args:
        model: Holds one EmbeddingCollection with the tables.
        sharder: Its sharder.
        ranks: The ranks and their memory.
        tables: The tables.
        dim: D.
        options: Other arguments of ``plan_table``; of several tables only ``averages``.

    Raises:
        ConfigError: FBGEMM's CUDA kernels do not support this D.
        PlanDoesNotFit: The rows of a rank do not fit into its memory.
    """
    if len(tables) == 1:
        return plan_row_wise(model, sharder, ranks, **options)
    is_cuda = ranks.device == "cuda"
    if is_cuda:
        check_cuda_dim(dim)
    blocks = rows_by_rank(tables[-1].ids.stop, ranks.count)
    _check_fit(tables, blocks, ranks, dim, **options)
    return ShardingPlan(
        {
            MODULE: EmbeddingModuleShardingPlan(
                {table.name: _by_rows(table, blocks, ranks, dim) for table in tables}
            )
        }
    )


def _by_rows(
    table: EntityTable, blocks: Sequence[range], ranks: Ranks, dim: int
) -> ParameterSharding:
    """Return TorchRec's description of a table with the rows of each rank's block of ids."""
    shards = []
    for rank, block in enumerate(blocks):
        first = min(max(0, block.start - table.ids.start), len(table.ids))
        rows = len(table.within(block.start, block.stop))
        place = placement(ranks.device, rank, ranks.per_host)
        shards.append(ShardMetadata([first, 0], [rows, dim], place))
    spec = EnumerableShardingSpec(shards)
    return ParameterSharding("row_wise", "fused", [*range(len(blocks))], spec)


def _check_fit(
    tables: Sequence[EntityTable], blocks: list[range], ranks: Ranks, dim: int, averages: int = 0
) -> None:
    room, is_cuda = ranks.room(), ranks.device == "cuda"
    for rank, block in enumerate(blocks):
        parts: dict[str, Bytes] = {}
        for table in tables:  # a type may have several
            form = TableForm(table.optimizer.name, averages=averages)
            own = table_memory(len(table.within(block.start, block.stop)), dim, form, is_cuda)
            parts[table.type] = sum(own.values(), parts.get(table.type, Bytes()))
        need = sum(parts.values(), Bytes())
        for kind, have in (("device", room.device), ("main", room.main)):
            if getattr(need, kind) > have:
                listed = ", ".join(
                    f"{name} {amount(getattr(size, kind))}" for name, size in parts.items()
                )
                raise PlanDoesNotFit(
                    f"the entity tables do not fit by rows on {ranks.count} ranks: rank {rank} "
                    f"needs {amount(getattr(need, kind))} ({listed}) of {kind} memory, of which "
                    f"it has {amount(have)}. Use more ranks, or a row-wise optimizer for the "
                    "largest type."
                )
