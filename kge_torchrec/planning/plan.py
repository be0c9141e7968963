"""The plan of a run: memory per rank, traffic per step and step time.

Where the shards go is TorchRec's arithmetic; the rest follows from them and from the run's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kge_torchrec.config import ConfigError
from kge_torchrec.data.parts import least_exchanges
from kge_torchrec.distributed.processes import rows_by_rank
from kge_torchrec.embeddings.torchrec.planner import (
    SHARDINGS,
    UVM_CACHING,
    Bytes,
    table_memory,
)
from kge_torchrec.planning import memory, step
from kge_torchrec.planning.cost import Cost, full_cost, objective_cost
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.layout import Layout, Setup, Shard
from kge_torchrec.planning.memory import RankMemory, RankStep
from kge_torchrec.planning.step import Traffic
from kge_torchrec.planning.workload import RankBatch, Workload


@dataclass(frozen=True)
class Limit:
    """The capacity of a memory and the bytes needed in it."""

    place: str  # "device memory of rank 3", "main memory of host 0"
    need: int
    capacity: int
    usable: int  # the capacity without the share that is left free

    @property
    def over(self) -> int:
        """Bytes over the capacity; negative if it fits."""
        return self.need - self.usable


@dataclass(frozen=True)
class TrainingPlan(Setup):
    """A setup, with the memory, traffic and time that it needs.

    Args:
        shards: Of the table, by rank.
        batches: Each rank's share of a step, in its micro-batches; empty against all entities.
        memory: Parts of each rank.
        cost: Of scoring the largest micro-batch.
        traffic: What a step sends.
        with_duplicates: What it would send without de-duplication.
        times: Seconds of each part of a step.
        looked_up: The rows that all ranks look up; None against all entities.
        of_tables: Seconds of each table (M), of lookups and of its optimizer.
    """

    shards: list[Shard]
    batches: list[list[RankBatch]]
    memory: list[RankMemory]
    cost: Cost
    traffic: Traffic
    with_duplicates: Traffic
    times: dict[str, float]
    looked_up: step.Lookups | None
    of_tables: dict[str, list[float]]

    def total(self, rank: int) -> Bytes:
        """Return what a rank needs in all."""
        return sum(self.memory[rank].values(), Bytes())

    def need(self, rank: int) -> int:
        """Return the bytes that a rank needs of the memory that it computes in."""
        return getattr(self.total(rank), self.place)

    @property
    def fullest(self) -> int:
        """The rank that needs the most memory."""
        return max(range(self.cluster.world_size), key=self.need)

    def host_memory(self, host: int) -> dict[str, int]:
        """Return the bytes of main memory by part that the ranks of a host need."""
        local = self.cluster.local_world_size
        ranks = self.memory[host * local : (host + 1) * local]
        return {
            part: sum(parts[part].main for parts in (ranks[:1] if part in memory.SHARED else ranks))
            for part in memory.PARTS
        }

    @cached_property
    def limits(self) -> list[Limit]:
        """Every device's memory, if there are GPUs, then every host's."""
        return [*self.limits_of("device"), *self.limits_of("main")]

    def limits_of(self, place: str) -> list[Limit]:
        """Return the limits of all devices ("device") or of all hosts ("main")."""
        device, ranks = self.cluster.device, range(self.cluster.world_size)
        if place == "main":
            needs = [
                # The system drops pages of files where memory is short.
                sum(
                    size
                    for part, size in self.host_memory(host).items()
                    if part not in memory.SHARED
                )
                for host in range(self.cluster.hosts)
            ]
            capacity, name = device.host_memory, "main memory of host"
        else:
            needs = [self.total(rank).device for rank in ranks] if self.is_cuda else []
            capacity, name = device.memory, "device memory of rank"
        usable = int(capacity * (1 - self.layout.reserve))
        return [Limit(f"{name} {i}", need, capacity, usable) for i, need in enumerate(needs)]

    @property
    def overruns(self) -> list[Limit]:
        """The limits that are exceeded, the worst first."""
        return sorted((x for x in self.limits if x.over > 0), key=lambda x: -x.over)

    @property
    def fits(self) -> bool:
        """Whether no limit is exceeded."""
        return not self.overruns

    @property
    def lookups(self) -> int:
        """Number of rows that a step looks up on all ranks, duplicates included."""
        return sum(batch.lookups for parts in self.batches for batch in parts)

    @property
    def distinct(self) -> float:
        """Number of distinct rows, each counted once per rank and micro-batch."""
        return sum(batch.distinct for parts in self.batches for batch in parts)

    @property
    def busiest(self) -> tuple[int, float]:
        """The rank that reads most rows, and its number of rows over the mean of all ranks."""
        served = np.ones(1) if self.looked_up is None else self.looked_up.served.sum(0)
        return int(served.argmax()), float(served.max() / served.mean())

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of a step for which each of ``RESOURCES`` works."""
        return {
            name: sum(self.times.get(part, 0.0) for part in parts)
            for name, parts in step.RESOURCES.items()
        }

    @property
    def bound(self) -> str:
        """The resource that decides how long a step takes."""
        busy = self.busy
        working = busy["device"] + busy["links"]  # one after the other
        if self.is_cuda and max(busy["host"], busy["loader"]) < working:
            return max("device", "links", key=lambda name: busy[name])
        return max(busy, key=lambda name: busy[name])

    @property
    def step_seconds(self) -> float:
        """Estimated seconds per step.

        A GPU works while the host starts its next operations and makes the next batch.
        """
        busy = self.busy
        if not self.is_cuda:
            return sum(busy.values())
        return max(busy["host"], busy["loader"], busy["device"] + busy["links"])

    @property
    def largest_time(self) -> str:
        """The part of a step that takes longest."""
        return max(self.times, key=lambda part: self.times[part])

    @property
    def examples_per_second(self) -> float:
        """Triples over all ranks, or queries if the examples of an epoch are queries."""
        return self.workload.batch_size / self.step_seconds

    @property
    def notes(self) -> list[str]:
        """Notes on what this plan leaves open."""
        notes, config = list[str](), self.workload.config
        regime, sharding = config.negatives.regime, self.layout.sharding
        if sharding != "row_wise":
            notes.append(f"{sharding} is planned only: training splits the table by rows")
        if self.form.kernel == UVM_CACHING:
            notes.append(f"no GPU has run {UVM_CACHING} yet: its times are of the model only")
        if regime == "kvssample":
            most = config.negatives.max_answers
            limit = f"up to {most:,} (negatives.max_answers)" if most else "any number"
            notes.append(
                "negatives.regime kvssample: activations, traffic and time assume one answer per "
                f"query; a query may have {limit}, of {4 * self.workload.dim:,} bytes per row"
            )
        if regime in ("kvsall", "kvssample"):
            notes.append(
                f"negatives.regime {regime}: an epoch has at most {self.workload.examples:,} "
                "queries; queries that several triples share occur once"
            )
        if self.workload.types and self.looked_up and self.workload.frequency.run is None:
            notes.append(
                "rows of a table are looked up in proportion to their number, since only data say "
                "how often a type occurs: plan with data.path and without --entities and --skew"
            )
        if config.train.computes_in_16_bits:
            notes.append(f"activations are counted in float32; {config.train.precision} needs less")
        copied = sum(map(self._copied_bytes, range(self.cluster.local_world_size)))
        if copied >= 1 << 30:
            notes.append(
                f"a checkpoint takes up to {copied / 2**30:,.1f} GiB more main memory per host "
                "while training continues; where that is not free, training waits "
                "(checkpoint.options.background)"
            )
        return notes

    def _copied_bytes(self, rank: int) -> int:
        """Return the most bytes of a rank that a checkpoint in the background copies."""
        if self.parts or not self.workload.config.checkpoint.options.background:
            return 0
        parts = (self.memory[rank][part] for part in ("weights", "optimizer state", "average"))
        return sum(size.device + size.main for size in parts)


def plan_training(workload: Workload, cluster: Cluster, layout: Layout) -> TrainingPlan:
    """Return the plan of a run on some devices, as ``plan_setup`` does."""
    return plan_setup(Setup(workload, cluster, layout))


def plan_setup(setup: Setup, cost: Cost | None = None) -> TrainingPlan:
    """Return the plan of a setup, whether it fits or not.

    Args:
        setup: The run, the devices and the layout.
        cost: Of scoring a micro-batch, if it is known. Ignored against all entities.

    Raises:
        ConfigError: The run, the devices and the layout do not go together.
    """
    setup.check()
    workload, cluster = setup.workload, setup.cluster
    shards = _shards(setup)
    shards_by_rank: list[list[Shard]] = [[] for _ in range(cluster.world_size)]
    for shard in shards:
        shards_by_rank[shard.rank].append(shard)
    if workload.is_full:
        batches: list[list[RankBatch]] = []
        rows = [sum(shard.rows for shard in own) for own in shards_by_rank]
        free = min(memory.free_memory(setup, own) for own in shards_by_rank)
        costs = {n: full_cost(workload, n, setup.is_cuda, free) for n in set(rows)}
        fetched, queries = memory.fetched_bytes(workload), memory.query_bytes(workload)
        # Every rank scores and updates its own rows.
        lookups = None
        updated = [sum(setup.rows_by_table(shard) for shard in own) for own in shards_by_rank]
        none = np.zeros(len(setup.forms))
        parts = [
            RankStep(costs[n], fetched, queries, looked_up=none, updated=none + own)
            for n, own in zip(rows, updated, strict=True)
        ]
    else:
        batches = workload.batches(cluster.world_size)
        by_table = np.stack([sum(batch.by_table for batch in own) for own in batches], 2)
        wanted = by_table[1 if setup.captures else 0]
        lookups = step.Lookups.of(setup, shards, wanted)
        parts = _lookup_steps(setup, batches, wanted.sum(0), lookups.served, cost)
    ranks = [memory.rank_memory(setup, *pair) for pair in zip(shards_by_rank, parts, strict=True)]
    if lookups is None:
        traffic = again = step.full_traffic(setup)
    else:
        traffic = step.lookup_traffic(setup, lookups)
        repeated = step.Lookups.of(setup, shards, by_table[1])
        again = step.lookup_traffic(setup, repeated)
    busiest = max(range(len(parts)), key=lambda rank: parts[rank].updated.sum())
    slowest, columns = parts[busiest], _mean_columns(shards_by_rank[busiest])
    hits, makes_batches = _cache_hits(setup, batches), ranks[busiest]["triples"].device > 0
    of_tables = step.table_seconds(setup, slowest, columns, hits)
    times = step.step_time(setup, slowest, of_tables, traffic, makes_batches)
    results = (ranks, slowest.cost, traffic, again, times, lookups, of_tables)
    return TrainingPlan(workload, cluster, setup.layout, shards, batches, *results)


def _lookup_steps(
    setup: Setup,
    batches: list[list[RankBatch]],
    wanted: np.ndarray,
    served: np.ndarray,
    cost: Cost | None,
) -> list[RankStep]:
    """Return what each rank does in a step with lookups; the cost is that of the largest batch.

    Args:
        setup: The run, the devices and the layout.
        batches: Each rank's share of a step.
        wanted: (W,) rows that each rank looks up.
        served: (M, W) rows of each table and rank that all ranks look up.
        cost: Of scoring a micro-batch, if it is known.
    """
    workload = setup.workload
    largest = [max(own, key=lambda batch: batch.lookups) for own in batches]
    if cost is None:
        biggest = max(largest, key=lambda batch: batch.chunks * batch.triples)
        cost = objective_cost(workload, biggest, setup.is_cuda)
    return [
        RankStep(
            cost,
            memory.exchange_bytes(workload, rows_out, float(rows_in.sum()))
            + memory.sums_bytes(workload, batch),
            memory.batch_bytes(workload, batch),
            looked_up=rows_in,
            updated=rows_in,
            ids=batch.lookups,
        )
        for batch, rows_out, rows_in in zip(largest, wanted.tolist(), served.T, strict=True)
    ]


def _shards(setup: Setup) -> list[Shard]:
    """Return the shards of all ranks, as TorchRec splits a table."""
    size, rows, dim = setup.cluster.world_size, setup.table_rows, setup.workload.dim
    sharding = setup.layout.sharding
    if setup.layout.is_replicated:
        return [Shard(rank, 0, rows, 0, dim) for rank in range(size)]
    if sharding == "table_wise":
        return [Shard(0, 0, rows, 0, dim)]
    if sharding == "column_wise":
        widths = (width for width in range(-(-dim // size), dim) if not (dim % width or width % 4))
        width = next(widths, dim)  # FBGEMM reads four elements at a time
        return [Shard(rank, 0, rows, rank * width, width) for rank in range(dim // width)]
    blocks = enumerate(rows_by_rank(rows, size))
    return [Shard(rank, block.start, len(block), 0, dim) for rank, block in blocks]


def _mean_columns(shards: list[Shard]) -> float:
    """Return the number of columns of an answer to one id, over a rank's shards."""
    rows = sum(shard.rows for shard in shards)
    return sum(shard.rows * shard.columns for shard in shards) / rows if rows else 0.0


def _cache_hits(setup: Setup, batches: list[list[RankBatch]]) -> float:
    """Return the share of a batch's rows that the cache holds; 0 without a cache."""
    if not setup.form.cache_ratio or not batches:
        return 0.0
    workload, batch = setup.workload, max(batches[0], key=lambda batch: batch.lookups)
    chance = workload.frequency.occurring(batch.positives, batch.negatives, workload.drawn)
    return workload.frequency.cache_hits(chance, setup.form.cache_ratio)


def table_sizes(plan: TrainingPlan) -> list[dict[str, Any]]:
    """Return what each node type's rows take: bytes per rank, lookups, time; [] without types.

    "rows" are those of a step on all ranks: "with_duplicates", "deduplicated" on their ranks, and
    "sent" to another rank.  "seconds" are of lookups and optimizer on the slowest rank.
    """
    sizes: dict[str, dict[str, Any]] = {}
    by_table = sum((batch.by_table for own in plan.batches for batch in own), np.zeros((2, 1)))
    for place, (kind, ids, form) in enumerate(plan.forms if plan.workload.types else []):
        own = sizes.setdefault(
            kind,
            {
                "type": kind,
                "entities": 0,
                "optimizer": form.optimizer,
                "bytes": [0] * plan.cluster.world_size,
                "rows": {"with_duplicates": 0.0, "deduplicated": 0.0, "sent": 0.0},
                "seconds": 0.0,
            },
        )
        own["entities"] += len(ids)
        own["seconds"] += float(sum(seconds[place] for seconds in plan.of_tables.values()))
        if plan.looked_up is not None:
            numbers = by_table[1, place], by_table[0, place], plan.looked_up.sent[place]
            for name, number in zip(own["rows"], numbers, strict=True):
                own["rows"][name] += float(number)
    for shard in plan.shards if sizes else []:
        for kind, rows, form in plan.pieces(shard):
            parts = table_memory(rows, shard.columns, form, plan.is_cuda).values()
            whole = sum(parts, Bytes())
            sizes[kind]["bytes"][shard.rank] += whole.device + whole.main
    return list(sizes.values())


def disk_use(plan: TrainingPlan) -> dict[str, Any] | None:
    """Return what a table on disk takes there, and what an epoch reads; None of one in memory."""
    parts = plan.parts
    if parts is None:
        return None
    memory = plan.memory[0]
    held = memory["weights"] + memory["optimizer state"]
    size = round((held.main + held.device) / parts.places)
    exchanges = parts.exchanges
    return {
        "parts": parts.parts,
        "buffer": parts.places,
        "part_bytes": size,
        "table_bytes": size * parts.parts,
        "exchanges": exchanges,
        "least_exchanges": parts.passes * least_exchanges(parts.parts, parts.places),
        "epoch_bytes": size * exchanges,
        "stage_seconds": plan.step_seconds * plan.workload.steps_per_epoch / (exchanges + 1),
    }


def alternatives(workload: Workload, cluster: Cluster, layout: Layout) -> list[TrainingPlan]:
    """Return a plan for every sharding that the run, the devices and the sizes allow.

    Those that fit come first, the fastest of them first.
    """
    plans = []
    for sharding in SHARDINGS:
        try:
            plans.append(plan_training(workload, cluster, replace(layout, sharding=sharding)))
        except ConfigError:  # such as columns against all entities
            continue
    return sorted(plans, key=lambda plan: (not plan.fits, plan.step_seconds))
