"""The plan of a run: whether it fits, what a rank sends in a step, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import Facts, without_effect
from kge_torchrec.data.parts import least_exchanges
from kge_torchrec.embeddings.torchrec.planner import Bytes, dense_state_numbers
from kge_torchrec.planning import step
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.memory import memory_of
from kge_torchrec.planning.rank import Rank
from kge_torchrec.planning.sizes import Sizes


@dataclass(frozen=True)
class Limit:
    """The capacity of a memory and the bytes needed in it."""

    place: str  # "memory of a GPU" or "main memory of a host"
    need: int
    capacity: int
    usable: int  # the capacity without the share that is left free

    @property
    def over(self) -> int:
        """Bytes over the capacity; negative if it fits."""
        return self.need - self.usable


@dataclass(frozen=True)
class Plan(Rank):
    """A run on some devices, with what it needs: made from config, sizes and cluster by ``of``."""

    @classmethod
    def of(cls, config: Config, sizes: Sizes, cluster: Cluster, **options: Any) -> Plan:
        """Return the plan of a config that may have nulls; ``options`` are other fields."""
        config.check_device(cluster.device.is_cuda)
        config = config.settled(sizes.graph, cluster.device.is_cuda, cluster.world_size)
        return cls(config, sizes, cluster, **options)

    def changed(self, keys: dict[str, Any], **fields: Any) -> Plan:
        """Return the plan with other values of config keys ("train.batch_size") and of fields.

        Raises:
            ConfigError: The config does not allow a value, or another key that is set loses its
                effect.
        """
        config = self.config
        for key, value in keys.items():
            section, name = key.split(".")
            changed = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: changed})
        idle = without_effect(self.config, Facts()) if keys else {}
        for key, reason in without_effect(config, Facts()).items() if keys else ():
            if key not in idle:
                raise ConfigError(reason)
        others = ("train.", "dense.", "entities.placement")
        costs = self.costs if all(key.startswith(others) for key in keys) else None
        return replace(self, config=config, known_costs=costs, **fields)

    # Memory.

    @cached_property
    def memory(self) -> dict[str, Bytes]:
        """The bytes of a rank by part, at the fullest moment of training."""
        return memory_of(self)

    @property
    def total(self) -> Bytes:
        """What a rank needs in all."""
        return sum(self.memory.values(), Bytes())

    @property
    def limits(self) -> list[Limit]:
        """The memory of a GPU, if there are GPUs, then that of a host.

        The ranks of a host share its main memory. Mapped triples need none of it: the system drops
        pages of files where memory is short.
        """
        device = self.cluster.device
        main = self.cluster.per_host * (self.total.main - self.memory["triples"].main)
        needs = [("main memory of a host", main, device.host_memory)]
        if self.is_cuda:
            needs.insert(0, ("memory of a GPU", self.total.device, device.memory))
        return [Limit(*need, int(need[2] * (1 - self.reserve))) for need in needs]

    @property
    def overruns(self) -> list[Limit]:
        """The limits that are exceeded, the worst first."""
        return sorted((x for x in self.limits if x.over > 0), key=lambda x: -x.over)

    @property
    def fits(self) -> bool:
        """Whether no limit is exceeded."""
        return not self.overruns

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint in memory: rows, parameters, optimizer state and averages."""
        numbers, train = self.costs.dense_numbers, self.config.train
        assert train.optimizer is not None
        rows = self.rows_of_types(range(self.sizes.rows))
        state = sum(
            n * form.row_state_bytes(self.dim) for n, form in zip(rows, self.forms, strict=True)
        )
        copies = 1 + train.averages
        dense = 4 * numbers * (copies + dense_state_numbers(train.optimizer))
        return int(4 * self.dim * self.sizes.rows * copies + state + dense)

    # A step.

    @cached_property
    def sent(self) -> dict[str, tuple[float, float]]:
        """The bytes that a rank sends in a step, within its host and to other hosts, by kind."""
        return step.sent_bytes(self, self.wanted)

    @property
    def sent_with_duplicates(self) -> dict[str, tuple[float, float]]:
        """The same if each place of a batch were looked up."""
        return step.sent_bytes(self, self.micro_batches * self.batch.lookups)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part of a step."""
        return step.seconds_of_parts(self, self.sent, self.memory["triples"].device > 0)

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of a step for which each of ``step.RESOURCES`` works."""
        return {
            name: sum(self.seconds.get(part, 0.0) for part in parts)
            for name, parts in step.RESOURCES.items()
        }

    @property
    def longest(self) -> tuple[str, ...]:
        """The resources that a step's time is the sum of.

        A GPU works while the host starts its next operations and makes the next batch, so the
        longest of the three counts. On a CPU all parts add up.
        """
        if not self.is_cuda:
            return tuple(step.RESOURCES)
        chains = [("host",), ("loader",), ("device", "links")]
        return max(chains, key=lambda chain: sum(self.busy[name] for name in chain))

    @property
    def bound(self) -> str:
        """The resource that decides how long a step takes."""
        return max(self.longest, key=lambda name: self.busy[name])

    @property
    def decisive(self) -> dict[str, float]:
        """The seconds of the parts that a step's time is the sum of."""
        parts = [part for name in self.longest for part in step.RESOURCES[name]]
        return {part: self.seconds[part] for part in parts if part in self.seconds}

    @property
    def step_seconds(self) -> float:
        """Estimated seconds per step."""
        return sum(self.decisive.values())

    @property
    def epoch_seconds(self) -> float:
        """Estimated seconds per epoch, without evaluation."""
        return self.step_seconds * self.steps_per_epoch

    @property
    def examples_per_second(self) -> float:
        """Triples over all ranks, or queries if the examples of an epoch are queries."""
        return self.batch_size / self.step_seconds

    @property
    def disk(self) -> dict[str, Any] | None:
        """What a table on disk takes there, and what an epoch reads; None of one in memory."""
        parts = self.parts
        if parts is None:
            return None
        held = self.memory["weights"] + self.memory["optimizer state"]
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
            "stage_seconds": self.epoch_seconds / (exchanges + 1),
        }
