"""Plans: shard sizes, what fits, what is said when it does not."""

from __future__ import annotations

import pytest

from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.shard import EntityTable, describe_rows
from kge_torchrec.embeddings.torchrec.collection import entity_collection
from kge_torchrec.embeddings.torchrec.planner import (
    GIB,
    PlanDoesNotFit,
    Ranks,
    plan_rows,
)
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder, fused_params

BIG = (86_000_000, 400)  # 128 GiB of values


def tables_of(num_entities: int, optimizer: str = "adam") -> list[EntityTable]:
    return [EntityTable.of_all(num_entities, make_optimizer(optimizer), EntityInit())]


def plan(num_entities: int, dim: int, world_size: int, device="cuda", optimizer="adam", **memory):
    memory = {"device_bytes": 80 * GIB, "host_bytes": 1024 * GIB} | memory
    tables = tables_of(num_entities, optimizer)
    local = min(world_size, 8)
    sizes = {name: memory.pop(name) for name in ("device_bytes", "host_bytes")}
    ranks = Ranks(world_size, local, device, **sizes)
    sharder = EntitySharder(fused_params(tables))
    return plan_rows(entity_collection(num_entities, dim), sharder, tables, ranks, **memory)


def rows_of(plan) -> list[int]:
    shards = plan.plan["entities"]["entity"].sharding_spec.shards
    return [shard.shard_sizes[0] for shard in shards]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("num_entities", "world_size", "rows"),
    [
        (5, 4, [2, 2, 1, 0]),
        (3, 4, [1, 1, 1, 0]),
        (8, 4, [2, 2, 2, 2]),
        (7, 1, [7]),
        (135, 64, [3] * 45 + [0] * 19),
    ],
)
def test_blocks_of_rows(num_entities, world_size, rows, device):
    assert rows_of(plan(num_entities, 8, world_size, device)) == rows


@pytest.mark.parametrize(
    ("sizes", "ranks", "options", "words"),
    [
        # 14.9 GiB of values: states add two, one or (almost) no times that.
        ((100_000_000, 40), 1, {"optimizer": "adam", "device_bytes": 48 * GIB}, ""),
        ((100_000_000, 40), 1, {"optimizer": "adam", "device_bytes": 44 * GIB}, "of device memory"),
        ((100_000_000, 40), 1, {"optimizer": "adagrad", "device_bytes": 33 * GIB}, ""),
        ((100_000_000, 40), 1, {"optimizer": "adagrad", "device_bytes": 29 * GIB}, "29.80 GiB"),
        ((100_000_000, 40), 1, {"optimizer": "sgd", "device_bytes": 18 * GIB}, ""),
        ((100_000_000, 40), 1, {"optimizer": "sgd", "device_bytes": 14 * GIB}, "weights 14.90 GiB"),
        ((100_000_000, 40), 1, {"optimizer": "sgd", "device_bytes": 44 * GIB, "averages": 1}, ""),
        ((100_000_000, 40), 1, {"optimizer": "sgd", "device_bytes": 44 * GIB, "averages": 2},
         r"weights 14.90 GiB, average 29.80 GiB"),
        (BIG, 4, {}, r"rank 0 gets 21,500,000 rows and needs 96.11 GiB"),
        (BIG, 4, {"kernel": "fused_uvm_caching", "cache_ratio": 0.1}, ""),
        # The ranks of a host share its main memory.
        (BIG, 8, {"device": "cpu", "host_bytes": 300 * GIB}, "of main memory"),
        (BIG, 8, {"device": "cpu", "host_bytes": 500 * GIB}, ""),
        (BIG, 16, {"device": "cpu", "host_bytes": 300 * GIB}, ""),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_refused(sizes, ranks, options, words):
    if not words:
        plan(*sizes, ranks, **options)
        return
    with pytest.raises(PlanDoesNotFit, match=words):
        plan(*sizes, ranks, **options)


def test_planning_does_not_change_the_parameter():
    tables, collection = tables_of(5), entity_collection(5, 8)
    plan_rows(collection, EntitySharder(fused_params(tables)), tables, Ranks(1, 1, "cpu"))
    assert not hasattr(collection.embeddings["entity"].weight, "_optimizer_classes")


def test_rows_of_ranks_are_described_in_words():
    assert describe_rows(tables_of(86_000_001), 4, 400, "kernel fused").splitlines() == [
        "entities.entity: by rows on 4 ranks, kernel fused",
        "  ranks 0-2: 21,500,001 rows x 400, 96.11 GiB each",
        "  rank 3: 21,499,998 rows x 400, 96.11 GiB each",
    ]


def test_unsupported_cuda_width_is_rejected():
    with pytest.raises(ConfigError, match=r"model.dim: .* a multiple of 4, not 6"):
        plan(100, 6, 1)
    with pytest.raises(ConfigError, match=r"model.dim: on CUDA .* 2,048 or less, not 2,052 "):
        plan(100, 2052, 1)
    plan(100, 2048, 1)
    for dim in (6, 2052):
        plan(100, dim, 1, device="cpu")
