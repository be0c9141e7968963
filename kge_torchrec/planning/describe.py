"""Plans in words: bytes, ranks that hold the same, and the few lines that training prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import ShardingPlan

from kge_torchrec.entities.torchrec.fused_params import from_fused_params
from kge_torchrec.planning.table_memory import TableForm

GIB = 1 << 30
Value = TypeVar("Value")


def describe_plan(plan: ShardingPlan, sharder: EmbeddingCollectionSharder | None = None) -> str:
    """A few lines for people: per table its sharding, rows and bytes of every rank.

    Bytes are those of float32 values, with the optimizer's state if ``sharder`` is given.
    """
    lines = []
    optimizer = from_fused_params(sharder.fused_params or {}).name if sharder else "sgd"
    form = TableForm(optimizer)
    for module, tables in plan.plan.items():
        for table, sharding in tables.items():
            shards = sharding.sharding_spec.shards
            lines.append(
                f"{module}.{table}: {sharding.sharding_type}, kernel {sharding.compute_kernel}, "
                f"{len(shards)} shards"
            )
            rows = [shard.shard_sizes[0] for shard in shards]
            dim = shards[0].shard_sizes[1]
            row_bytes = 4 * dim + form.row_state_bytes(dim)
            for first, last, count in runs(rows):
                ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
                lines.append(f"  {ranks}: {count:,} rows x {dim}, {amount(count * row_bytes)} each")
    return "\n".join(lines)


def runs(values: Sequence[Value]) -> Iterator[tuple[int, int, Value]]:
    """(first, last, value) of neighbours that are equal."""
    first = 0
    for at in range(1, len(values) + 1):
        if at == len(values) or values[at] != values[first]:
            yield first, at - 1, values[first]
            first = at


def amount(size: float) -> str:
    """Bytes for people: 96.11 GiB."""
    if size >= 10 << 40:
        return f"{size / (1 << 40):.2f} TiB"
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit / 10:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"
