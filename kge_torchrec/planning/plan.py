"""A run laid out without running it: which rank holds what, what is sent, what a step takes.

TorchRec's planner says where the shards go; everything else follows from them and from the sizes
of the run.  ``TrainingPlan`` is what is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import nn

from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.torchrec.collection import entity_collection
from kge_torchrec.embeddings.torchrec.planned import MODULE, Shard, shards_of
from kge_torchrec.embeddings.torchrec.planner import (
    DENSE,
    SHARDINGS,
    UNLIMITED,
    UVM_CACHING,
    Bytes,
    plan_table,
)
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder, fused_params
from kge_torchrec.planning import full_step
from kge_torchrec.planning.choice import KERNELS, Choice
from kge_torchrec.planning.communication import Traffic, exchanges, groups, traffic
from kge_torchrec.planning.cost import objective_cost, step_time
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.layout import DenseLayout
from kge_torchrec.planning.memory import (
    SHARED,
    RankMemory,
    batch_bytes,
    exchange_bytes,
    on_device,
    rank_memory,
)
from kge_torchrec.planning.operations import Cost
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
    layout = DenseLayout.of(workload.config.dense, cluster)
    memory = []
    for own, n in zip(of_rank, rows, strict=True):
        parts = rank_memory(workload, cluster, choice, own, costs[n], moved, batch)
        parts["gradients"] += on_device(cluster, full_step.held_bytes(workload, n))
        sums = full_step.dense_sum_bytes(workload, layout)
        parts["dense parameters"] += on_device(cluster, sums)
        memory.append(parts)
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
    frequency = workload.frequency
    chance = frequency.occurring(batch.positives, batch.negatives, workload.negative_power)
    return frequency.cache_hits(chance, choice.cache_ratio)


@dataclass(frozen=True)
class Limit:
    """One memory and what is wanted of it."""

    place: str  # "device memory of rank 3", "main memory of host 0"
    need: int
    capacity: int
    usable: int  # the capacity without the share that is left free

    @property
    def over(self) -> int:
        """Bytes too many; below zero where it fits."""
        return self.need - self.usable


@dataclass(frozen=True)
class TrainingPlan:
    """The layout of a run and what follows from it.

    shards: of the table, by rank.  batches: each rank's share of a step, in its micro-batches.
    memory: parts of each rank.  cost: of scoring a micro-batch.  with_duplicates: traffic if
    batches were not de-duplicated.  Against all entities nothing is looked up, batches are none.
    """

    workload: Workload
    cluster: Cluster
    choice: Choice
    shards: list[Shard]
    batches: list[list[RankBatch]]
    memory: list[RankMemory]
    cost: Cost
    traffic: Traffic
    with_duplicates: Traffic
    times: dict[str, float]

    def total(self, rank: int) -> Bytes:
        """What a rank needs in all."""
        return sum(self.memory[rank].values(), Bytes())

    @cached_property
    def limits(self) -> list[Limit]:
        """Every device's memory, if there are GPUs, then every host's."""
        return [*self._device_limits(), *self._host_limits()]

    def _device_limits(self) -> Iterator[Limit]:
        capacity = self.cluster.device.memory
        if not self.cluster.device.is_cuda:
            return
        usable = int(capacity * (1 - self.choice.reserve))
        for rank in range(self.cluster.world_size):
            yield Limit(f"device memory of rank {rank}", self.total(rank).device, capacity, usable)

    def _host_limits(self) -> Iterator[Limit]:
        capacity, local = self.cluster.device.host_memory, self.cluster.local_world_size
        usable = int(capacity * (1 - self.choice.reserve))
        for host in range(self.cluster.hosts):
            ranks = range(host * local, (host + 1) * local)
            need = sum(
                size.main
                for rank in ranks
                for part, size in self.memory[rank].items()
                if part not in SHARED  # the system drops pages of files where memory is short
            )
            yield Limit(f"main memory of host {host}", need, capacity, usable)

    @property
    def overruns(self) -> list[Limit]:
        """The limits that are exceeded, the worst first."""
        return sorted((x for x in self.limits if x.over > 0), key=lambda x: -x.over)

    @property
    def fits(self) -> bool:
        return not self.overruns

    @property
    def fullest(self) -> int:
        """The rank that needs most."""
        is_cuda = self.cluster.device.is_cuda
        needs = [self.total(rank) for rank in range(self.cluster.world_size)]
        return max(range(len(needs)), key=lambda r: needs[r].device if is_cuda else needs[r].main)

    @property
    def notes(self) -> list[str]:
        """What this plan leaves open."""
        found, config = self.choice.notes(), self.workload.config
        regime = config.negatives.regime
        if regime == "kvssample":
            most = config.negatives.max_answers
            limit = f"up to {most:,} (negatives.max_answers)" if most else "any number"
            found.append(
                "negatives.regime kvssample: activations, traffic and time are of queries with one "
                f"answer each; a query may bring {limit}, of {4 * self.workload.dim:,} bytes a row"
            )
        if regime in ("kvsall", "kvssample"):
            found.append(
                f"negatives.regime {regime}: an epoch has at most {self.workload.examples:,} "
                "queries, less those that several triples ask"
            )
        if config.train.precision != "fp32":
            found.append(f"activations are counted in float32, {config.train.precision} needs less")
        return found

    @property
    def lookups(self) -> int:
        """Entities that a step looks up on all ranks, duplicates included."""
        return sum(batch.lookups for parts in self.batches for batch in parts)

    @property
    def distinct(self) -> float:
        """Different ones, each counted once a rank and micro-batch."""
        return sum(batch.distinct for parts in self.batches for batch in parts)

    @property
    def step_seconds(self) -> float:
        """Of the model in ``step_time``."""
        return sum(self.times.values())

    @property
    def largest_time(self) -> str:
        """The part of a step that takes longest."""
        return max(self.times, key=lambda part: self.times[part])
