"""What a dry run found: the layout of a run, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kge_torchrec.planning.choice import Choice
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.memory import SHARED, RankMemory
from kge_torchrec.planning.shards import Shard
from kge_torchrec.planning.table_memory import Bytes
from kge_torchrec.planning.traffic import Traffic
from kge_torchrec.planning.watch_operations import Cost
from kge_torchrec.planning.workload import RankBatch, Workload


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
            need = sum(self.total(rank).main for rank in ranks)
            again = sum(self.memory[ranks[0]][part].main for part in SHARED) * (local - 1)
            yield Limit(f"main memory of host {host}", need - again, capacity, usable)

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
