"""The plan of a run: one rank of it, what it needs, whether that fits, and how long it takes.

It is the rank with the most rows. Training splits rows so that every rank but the last has equally
many. How many different rows a batch has is expected, not counted (see ``sizes``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import Facts, without_effect
from kge_torchrec.config.registry import resolve
from kge_torchrec.data.parts import PartLayout, least_exchanges
from kge_torchrec.distributed.processes import rows_by_rank
from kge_torchrec.embeddings.torchrec.planner import (
    DENSE,
    FUSED,
    UVM_CACHING,
    Bytes,
    TableForm,
    check_cuda_dim,
    dense_state_numbers,
    table_memory,
)
from kge_torchrec.planning import step
from kge_torchrec.planning.batch import Batch
from kge_torchrec.planning.cost import Cost, Costs
from kge_torchrec.planning.devices import Cluster, is_number
from kge_torchrec.planning.memory import CUDA_PROCESS, memory_of
from kge_torchrec.planning.sizes import Sizes
from kge_torchrec.training.assembly import sides_of


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
class Plan:
    """A run on some devices, and what it needs.

    Args:
        config: The config, with a value for every null: ``of`` chooses them.
        sizes: The sizes of the graph.
        cluster: The devices.
        layout: How the table is split, one of ``SHARDINGS``; training has row_wise.
        reserve: Share of each device's memory, and of a CPU host's, that is left free.
        counted: The costs of the scorer, shared by plans with the same one.

    Raises:
        ConfigError: The run and the devices do not go together.
    """

    config: Config
    sizes: Sizes
    cluster: Cluster
    layout: str = "row_wise"
    reserve: float = 0.05
    counted: Costs | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        config, ranks = self.config, self.cluster.world_size
        unknown = sorted((config.entities.tables or {}).keys() - {*self.sizes.types})
        problems = {
            f"--reserve must be in [0, 1), got {self.reserve}": (
                not (is_number(self.reserve) and 0 <= self.reserve < 1)
            ),
            f"entities.tables: the sizes of {', '.join(unknown)} are not known; plan with typed "
            "data, or give --entities user=600k,item=400k": bool(unknown),
            f"dense.wrapper none is for one rank, not for {ranks}; use auto": (
                config.dense.wrapper == "none" and ranks > 1
            ),
            f"dense.options.replicas: {ranks} ranks cannot be split into {self.dense_copies} "
            "equal groups": ranks % self.dense_copies > 0,
        }
        for problem, holds in problems.items():
            if holds:
                raise ConfigError(problem)
        if self.is_cuda and config.entities.engine == "torchrec":
            check_cuda_dim(self.dim)

    @classmethod
    def of(cls, config: Config, sizes: Sizes, cluster: Cluster, reserve: float = 0.05) -> Plan:
        """Return the plan of a config that may have nulls."""
        config.check_device(cluster.device.is_cuda)
        config = config.settled(sizes.graph, cluster.device.is_cuda, cluster.world_size)
        return cls(config, sizes, cluster, reserve=reserve)

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
        if keys:
            idle = without_effect(self.config, Facts())
            for key, reason in without_effect(config, Facts()).items():
                if key not in idle:
                    raise ConfigError(reason)
        others = ("train.", "dense.", "entities.placement")
        costs = self.costs if all(key.startswith(others) for key in keys) else None
        return replace(self, config=config, counted=costs, **fields)

    # The run.

    @cached_property
    def costs(self) -> Costs:
        return self.counted or Costs(self.config, self.sizes.relations)

    @property
    def is_cuda(self) -> bool:
        return self.cluster.device.is_cuda

    @property
    def place(self) -> str:
        """Memory that a rank computes in, as a field of Bytes."""
        return "device" if self.is_cuda else "main"

    @property
    def dim(self) -> int:
        """D."""
        assert self.config.model.dim is not None
        return self.config.model.dim

    @property
    def is_full(self) -> bool:
        """Whether every query is compared with all entities."""
        return self.config.negatives.is_full

    @property
    def examples(self) -> int:
        """Number of examples per epoch: triples, or queries.

        Several triples can share a query, which then occurs once. Only the data would show that.
        """
        negatives, sizes = self.config.negatives, self.sizes
        sides = len(sides_of(negatives.sides))
        if negatives.regime == "allvsall":
            return sides * sizes.entities * sizes.relations
        return sizes.triples * (1 if negatives.examples == "triples" else sides)

    @property
    def batch_size(self) -> int:
        """Number of examples per step over all ranks, at most an epoch's."""
        assert self.config.train.batch_size is not None
        return min(self.config.train.batch_size, self.examples)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step."""
        return self.config.train.accumulation

    @property
    def queries(self) -> int:
        """Q. A triple is queried on each side, unless an epoch passes through queries."""
        negatives = self.config.negatives
        per_example = len(sides_of(negatives.sides)) if negatives.examples == "triples" else 1
        return self.batch_size * per_example

    @property
    def fetched(self) -> int:
        """Rows that every rank fetches for its queries of a step against all entities.

        One per query, or two for relation prediction and penalties on whole triples.
        """
        loss = self.config.loss
        penalties = any(resolve("regularizer", name).takes_triples for name in loss.regularizers)
        return self.queries * (2 if loss.relation_weight or penalties else 1)

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph holds the scores of a step."""
        ranks, has_features = self.cluster.world_size, self.sizes.num_features > 0
        return self.config.captures(self.is_cuda, ranks, has_features)

    @property
    def dense_is_sharded(self) -> bool:
        """Whether the wrapper gathers whole dense parameters to run."""
        return self.config.dense.wrapper in ("fsdp", "hybrid")

    @property
    def dense_copies(self) -> int:
        """Number of copies of the dense parameters, as distributed.dense makes them."""
        dense, cluster = self.config.dense, self.cluster
        copies = {"fsdp": 1, "hybrid": dense.options.replicas or cluster.hosts}
        return copies.get(dense.wrapper, cluster.world_size)

    @property
    def dense_splits(self) -> int:
        """Number of neighboring ranks that hold a copy together."""
        return self.cluster.world_size // self.dense_copies

    # The table.

    @cached_property
    def parts(self) -> PartLayout | None:
        """How a table on disk is cut into parts; None of one in memory."""
        return PartLayout.of_config(self.config, self.sizes.rows, self.cluster.world_size)

    @cached_property
    def forms(self) -> list[TableForm]:
        """The storage of rows and optimizer state, for each type (M)."""
        entities, train = self.config.entities, self.config.train
        replicated = self.layout == "data_parallel"
        tables = (entities.table_of(x, train, self.config.model) for x in self.sizes.types)
        return [
            TableForm(
                table.optimizer,
                DENSE if replicated else UVM_CACHING if entities.cache_ratio else FUSED,
                0.0 if replicated else entities.cache_ratio,
                state_bytes=2 if entities.preset == "dicee" else 4,
                counts_rows=entities.preset == "dgl" and table.optimizer == "adam",
                state_in_main=entities.preset == "dicee",
                averages=train.averages,
            )
            for table in tables
        ]

    @cached_property
    def held(self) -> np.ndarray:
        """(R, M) rows of each type in the memory of each rank; of one rank if all are alike."""
        types = len(self.sizes.types)
        if self.parts is not None:
            return np.array([[self.parts.buffer_rows] + [0] * (types - 1)])
        blocks = [range(self.sizes.rows)]
        if self.layout == "row_wise":
            blocks = rows_by_rank(self.sizes.rows, self.cluster.world_size)
        return np.stack(
            [self.sizes.rows_of_types(x) for x in (blocks if types > 1 else blocks[:1])]
        )

    @cached_property
    def rows(self) -> np.ndarray:
        """(M,) rows of each type of the rank that needs the most memory for them."""
        sizes = [sum(self.table_of(rows).values(), Bytes()) for rows in self.held]
        return self.held[max(range(len(sizes)), key=lambda i: sizes[i].device + sizes[i].main)]

    @property
    def columns(self) -> int:
        """Columns of a shard, as TorchRec splits them."""
        if self.layout != "column_wise":
            return self.dim
        # FBGEMM reads four elements at a time.
        widths = range(-(-self.dim // self.cluster.world_size), self.dim)
        return next((w for w in widths if not (self.dim % w or w % 4)), self.dim)

    def table_of(self, rows: np.ndarray) -> dict[str, Bytes]:
        """Return the bytes of a shard's rows of each type (M,) by part."""
        parts: dict[str, Bytes] = {}
        for count, form in zip(rows.tolist(), self.forms, strict=True):
            for part, size in table_memory(count, self.columns, form, self.is_cuda).items():
                parts[part] = parts.get(part, Bytes()) + size
        return parts

    # A micro-batch.

    @cached_property
    def candidates(self) -> dict[Any, int]:
        """K per side."""
        negatives = self.config.negatives
        chunk_size = negatives.chunk_size or self.batch_size
        return {side: negatives.candidates(side, chunk_size) for side in sides_of(negatives.sides)}

    @cached_property
    def batch(self) -> Batch:
        """The largest micro-batch of a rank."""
        shares = self.cluster.world_size * self.micro_batches
        return Batch.of(self.config.negatives, self.sizes, self.batch_size, shares)

    @property
    def wanted(self) -> np.ndarray:
        """(M,) rows of each type that a rank looks up in a step."""
        rows = self.batch.lookups if self.captures else self.batch.distinct
        return self.micro_batches * rows

    @cached_property
    def busiest(self) -> tuple[int, np.ndarray, float]:
        """The rank that reads the most rows for all ranks in a step.

        With its rows of each type (M,), and their number over the mean of all ranks.
        """
        ranks, wanted = self.cluster.world_size, self.wanted
        if self.is_full:  # it scores and updates its own rows
            return 0, self.rows, 1.0
        if self.layout == "row_wise" and len(self.held) > 1:
            loads = ranks * wanted * (self.held / self.held.sum(0).clip(1))
            numbers = loads.sum(1)
            rank = int(np.argmax(numbers))
            return rank, loads[rank], float(numbers[rank] / np.mean(numbers))
        if self.layout in ("row_wise", "data_parallel"):
            return 0, wanted, 1.0
        return 0, ranks * wanted, ranks * self.columns / self.dim

    @cached_property
    def cost(self) -> Cost:
        """The cost of scoring a micro-batch."""
        if not self.is_full:
            shape = self.batch.chunks, self.batch.triples
            return self.costs.of_batch(*shape, self.candidates, self.is_cuda)
        held = sum(self.table_of(self.rows).values(), CUDA_PROCESS).device
        free = max(0, self.cluster.device.memory - held)
        queries = -(-self.queries // self.micro_batches)
        return self.costs.of_all(int(self.rows.sum()), queries, self.is_cuda, free)

    # Memory.

    @cached_property
    def memory(self) -> dict[str, Bytes]:
        """The bytes of a rank by part, at the fullest moment of training."""
        return memory_of(self, self.cost.peak_bytes)

    @property
    def total(self) -> Bytes:
        """What a rank needs in all."""
        return sum(self.memory.values(), Bytes())

    @property
    def limits(self) -> list[Limit]:
        """The memory of a GPU, if there are GPUs, then that of a host."""
        return self._limits(self.memory)

    def _limits(self, memory: dict[str, Bytes]) -> list[Limit]:
        """Return the limits for other memory.

        The ranks of a host share its main memory. Mapped triples need none of it: the system drops
        pages of files where memory is short.
        """
        device, total = self.cluster.device, sum(memory.values(), Bytes())
        main = self.cluster.per_host * (total.main - memory["triples"].main)
        needs = [("main memory of a host", main, device.host_memory)]
        if self.is_cuda:
            needs.insert(0, ("memory of a GPU", total.device, device.memory))
        return [Limit(*need, int(need[2] * (1 - self.reserve))) for need in needs]

    @property
    def overruns(self) -> list[Limit]:
        """The limits that are exceeded, the worst first."""
        return sorted((x for x in self.limits if x.over > 0), key=lambda x: -x.over)

    @property
    def fits(self) -> bool:
        return not self.overruns

    def fits_with(self, peak_bytes: float) -> bool:
        """Return whether the run would fit with these bytes of activations, without a count."""
        return all(limit.over <= 0 for limit in self._limits(memory_of(self, peak_bytes)))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint in memory: rows, parameters, optimizer state and averages."""
        numbers, train, all_rows = self.costs.dense_numbers, self.config.train, self.sizes.rows
        assert train.optimizer is not None
        rows = self.sizes.rows_of_types(range(all_rows))
        state = sum(
            n * form.row_state_bytes(self.dim) for n, form in zip(rows, self.forms, strict=True)
        )
        copies = 1 + train.averages
        dense = 4 * numbers * (copies + dense_state_numbers(train.optimizer))
        return int(4 * self.dim * all_rows * copies + state + dense)

    # Traffic and time.

    @cached_property
    def sent(self) -> step.Sent:
        """The bytes that a rank sends in a step, within its host and to other hosts, by kind."""
        return step.sent_bytes(self)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part of a step."""
        return step.seconds_of_parts(self)

    @cached_property
    def decisive(self) -> dict[str, dict[str, float]]:
        """The seconds of the parts that a step's time is the sum of, by resource.

        A GPU works while the host starts its next operations and makes the next batch, so the
        longest of the three counts. On a CPU all parts add up.
        """
        busy = {
            name: {part: self.seconds[part] for part in parts if part in self.seconds}
            for name, parts in step.RESOURCES.items()
        }
        chains = [("host",), ("loader",), ("device", "links")] if self.is_cuda else [tuple(busy)]
        longest = max(chains, key=lambda chain: sum(sum(busy[x].values()) for x in chain))
        return {name: busy[name] for name in longest}

    @property
    def bound(self) -> str:
        """The resource that decides how long a step takes."""
        return max(self.decisive, key=lambda name: sum(self.decisive[name].values()))

    @property
    def step_seconds(self) -> float:
        """Estimated seconds per step."""
        return sum(sum(parts.values()) for parts in self.decisive.values())

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps per epoch; the last, smaller step counts as a part of one."""
        return self.examples / self.batch_size

    @property
    def epoch_seconds(self) -> float:
        """Estimated seconds per epoch, without evaluation."""
        return self.step_seconds * self.steps_per_epoch

    @property
    def disk(self) -> dict[str, Any] | None:
        """What a table on disk takes there, and what an epoch reads; None of one in memory."""
        parts = self.parts
        if parts is None:
            return None
        held = self.memory["weights"] + self.memory["optimizer state"]
        size, exchanges = round((held.main + held.device) / parts.places), parts.exchanges
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
