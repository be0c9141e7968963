"""A run laid out without running it: which rank holds what, what is sent, what a step takes.

TorchRec's planner says where the shards go; everything else follows from them and from the sizes
of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch import nn

from kge_torchrec.config import ConfigError
from kge_torchrec.entities.table_optimizer import TableOptimizer
from kge_torchrec.entities.torchrec.collection import entity_collection
from kge_torchrec.entities.torchrec.fused_params import fused_params
from kge_torchrec.entities.torchrec.sharder import EntitySharder
from kge_torchrec.planning import full_step
from kge_torchrec.planning.choice import KERNELS, Choice
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.memory import batch_bytes, exchange_bytes, rank_memory
from kge_torchrec.planning.objective_cost import objective_cost
from kge_torchrec.planning.planner import SHARDINGS, UNLIMITED, plan_table
from kge_torchrec.planning.shards import MODULE, Shard, shards_of
from kge_torchrec.planning.step_time import step_time
from kge_torchrec.planning.table_memory import DENSE, UVM_CACHING
from kge_torchrec.planning.traffic import exchanges, groups, traffic
from kge_torchrec.planning.training_plan import TrainingPlan
from kge_torchrec.planning.watch_operations import Cost
from kge_torchrec.planning.workload import RankBatch, Workload


def plan_training(
    workload: Workload, cluster: Cluster, choice: Choice, cost: Cost | None = None
) -> TrainingPlan:
    """Lays a run out, whether it fits or not.  Raises ConfigError where it cannot be.

    cost: of scoring a micro-batch, if it is known; against all entities it is not asked for.
    """
    choice.check(workload, cluster)
    shards = _shards(workload, cluster, choice)
    if workload.config.negatives.is_full:
        return _plan_against_all(workload, cluster, choice, shards)
    return _plan_lookups(workload, cluster, choice, shards, cost)


def _plan_lookups(
    workload: Workload, cluster: Cluster, choice: Choice, shards: list[Shard], cost: Cost | None
) -> TrainingPlan:
    batches = workload.batches(cluster.world_size)
    deduplicated = np.array([sum(batch.distinct for batch in parts) for parts in batches])
    duplicated = np.array([float(sum(batch.lookups for batch in parts)) for parts in batches])
    wanted = deduplicated if workload.config.entities.deduplicate else duplicated
    moves = exchanges(cluster, choice, shards, workload, wanted)
    largest = [max(parts, key=lambda batch: batch.lookups) for parts in batches]
    if cost is None:
        biggest = max(largest, key=lambda batch: batch.chunks * batch.triples)
        cost = objective_cost(workload, biggest, cluster.device.is_cuda)
    of_rank = _by_rank(shards, cluster)
    memory = [
        rank_memory(
            workload, cluster, choice, of_rank[rank], cost,
            exchange_bytes(workload, moves[rank]), batch_bytes(workload, largest[rank]),
        )
        for rank in range(cluster.world_size)
    ]  # fmt: skip
    table = [parts["weights"] + parts["optimizer state"] for parts in memory]
    table_bytes = np.array([float(size.device + size.main) for size in table])
    sent = traffic(cluster, choice, shards, workload, wanted, table_bytes)
    busiest = max(range(cluster.world_size), key=lambda rank: moves[rank].asked)
    times = step_time(
        workload,
        cluster,
        choice.form(workload),
        moves[busiest],
        _mean_columns(of_rank[busiest]),
        cost,
        sent,
        _cache_hits(workload, choice, largest[0]),
    )
    again = traffic(cluster, choice, shards, workload, duplicated, table_bytes)
    return TrainingPlan(
        workload, cluster, choice, shards, batches, memory, cost, sent, again, times
    )


def _plan_against_all(
    workload: Workload, cluster: Cluster, choice: Choice, shards: list[Shard]
) -> TrainingPlan:
    """Every rank scores its own rows: nothing is looked up."""
    of_rank = _by_rank(shards, cluster)
    rows = [sum(shard.rows for shard in own) for own in of_rank]
    costs = {n: full_step.full_cost(workload, n, cluster.device.is_cuda) for n in set(rows)}
    moved, batch = full_step.fetched_bytes(workload), full_step.batch_bytes(workload)
    memory = [
        rank_memory(workload, cluster, choice, own, costs[n], moved, batch)
        for own, n in zip(of_rank, rows, strict=True)
    ]
    sent, cost = full_step.full_traffic(workload, cluster), costs[max(rows)]
    times = full_step.full_step_time(
        workload, cluster, choice.form(workload), max(rows), workload.dim, cost, sent
    )
    return TrainingPlan(workload, cluster, choice, shards, [], memory, cost, sent, sent, times)


def _by_rank(shards: list[Shard], cluster: Cluster) -> list[list[Shard]]:
    of_rank: list[list[Shard]] = [[] for _ in range(cluster.world_size)]
    for shard in shards:
        of_rank[shard.rank].append(shard)
    return of_rank


def alternatives(workload: Workload, cluster: Cluster, choice: Choice) -> list[TrainingPlan]:
    """Every layout that these devices and sizes allow: first those that fit, fastest first.

    Tables in two types, every sharding and kernel, and 2-D with two and more whole tables.
    """
    plans = []
    for candidate in _candidates(cluster, choice):
        try:
            plans.append(plan_training(workload, cluster, candidate))
        except ConfigError:  # such as groups that do not divide the devices
            continue
    return sorted(plans, key=lambda p: (not p.fits, p.step_seconds))


def _candidates(cluster: Cluster, choice: Choice) -> Iterator[Choice]:
    is_cuda = cluster.device.is_cuda
    for sharding in SHARDINGS:
        for kernel in KERNELS if is_cuda and sharding != "data_parallel" else KERNELS[:1]:
            for dtype in ("fp32", "fp16") if is_cuda else ("fp32",):
                yield replace(choice, sharding=sharding, kernel=kernel, dtype=dtype, replicas=1)
    replicas = 2
    while is_cuda and replicas < cluster.world_size:
        yield replace(choice, sharding="row_wise", kernel="fused", dtype="fp32", replicas=replicas)
        replicas *= 2


def _shards(workload: Workload, cluster: Cluster, choice: Choice) -> list[Shard]:
    """The planner's shards for one whole table, repeated for every replica."""
    model = nn.Module()
    model.add_module(MODULE, entity_collection(workload.num_entities, workload.dim))
    # The planner is asked where shards go; whether they fit is looked at with everything else.
    sharder = EntitySharder(fused_params=fused_params(TableOptimizer(workload.optimizer)))
    size = cluster.world_size // choice.replicas
    plan = plan_table(
        model,
        sharder,
        size,
        min(size, cluster.local_world_size),
        cluster.device.kind,
        sharding=choice.sharding,
        kernel=DENSE if choice.sharding == "data_parallel" else choice.kernel,
        cache_load_factor=choice.cache_ratio if choice.kernel == UVM_CACHING else None,
        device_bytes=UNLIMITED,
        host_bytes=UNLIMITED,
    )
    first = shards_of(plan, workload.num_entities, workload.dim)
    return [
        replace(shard, rank=int(group[shard.rank]))
        for group in groups(cluster, choice)
        for shard in first
    ]


def _mean_columns(shards: list[Shard]) -> float:
    """Columns of an answer to one id, over a rank's shards."""
    rows = sum(shard.rows for shard in shards)
    return sum(shard.rows * shard.columns for shard in shards) / rows if rows else 0.0


def _cache_hits(workload: Workload, choice: Choice, batch: RankBatch) -> float:
    if choice.kernel != UVM_CACHING:
        return 0.0
    popularity = workload.popularity
    chance = popularity.occurring(batch.positives, batch.negatives, workload.negative_power)
    return popularity.cache_hits(chance, choice.cache_ratio)
