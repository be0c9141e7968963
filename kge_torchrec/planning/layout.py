"""A run with its devices, and the layout of the entity table and the dense parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kge_torchrec.config import ConfigError, DenseConfig
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.embeddings.torchrec.planner import (
    DENSE,
    FUSED,
    SHARDINGS,
    UVM_CACHING,
    Bytes,
    TableForm,
    check_cuda_dim,
    dense_state_numbers,
)
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.workload import Workload


@dataclass(frozen=True)
class Layout:
    """The layout of the entity table.

    Args:
        sharding: row_wise, column_wise, table_wise or data_parallel.
        reserve: Share of each device's memory, and of a CPU host's, that is left free.

    Raises:
        ConfigError: A value is none of these.
    """

    sharding: str = "row_wise"
    reserve: float = 0.05

    def __post_init__(self) -> None:
        if self.sharding not in SHARDINGS:
            raise ConfigError(
                f"--sharding must be one of {', '.join(SHARDINGS)}, got {self.sharding!r}"
            )
        if not 0 <= self.reserve < 1:
            raise ConfigError(f"--reserve must be in [0, 1), got {self.reserve}")

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole table."""
        return self.sharding == "data_parallel"


@dataclass(frozen=True)
class Shard:
    """A block of the table on one rank."""

    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True)
class DenseLayout:
    """The layout of the dense parameters: replicas, each split over some ranks.

    It follows ``distributed.dense``.

    Args:
        splits: Number of neighboring ranks that hold a copy together; 1 if every rank holds all.
        is_sharded: Whether the wrapper is fsdp or hybrid, which gather whole parameters to run.
        gathers: Number of gathers per forward and backward.
        offload: Whether parts, their gradients and optimizer state lie in main memory.
    """

    splits: int = 1
    is_sharded: bool = False
    gathers: int = 0
    offload: bool = False

    @classmethod
    def of(cls, config: DenseConfig, cluster: Cluster) -> DenseLayout:
        """Return the layout that a config means.

        Raises:
            ConfigError: Training would refuse the config on these ranks.
        """
        ranks = cluster.world_size
        if config.wrapper == "none" and ranks > 1:
            raise ConfigError(f"dense.wrapper none is for one rank, not for {ranks}; use auto")
        if config.wrapper not in ("fsdp", "hybrid"):
            return cls()
        options = config.options
        copies = (options.replicas or cluster.hosts) if config.wrapper == "hybrid" else 1
        if ranks % copies:
            raise ConfigError(
                f"dense.options.replicas: {ranks} ranks cannot be split into {copies} equal groups"
            )
        gathers = 2 if options.sharding == "full" else 1
        return cls(ranks // copies, True, gathers, options.cpu_offload)

    def memory(self, workload: Workload, is_cuda: bool) -> Bytes:
        """Return a rank's bytes of parameters, gradients, state and averages, all float32.

        DDP's buckets are views of the gradients. FSDP gathers whole parameters. It scatters whole
        gradients: those of a backward are among the activations. Against all entities they are
            summed over blocks first, and held once more where they are sent.
        """
        numbers = workload.dense_parameters
        averages = workload.config.train.averages
        bytes_per_element = 4 * (2 + dense_state_numbers(workload.optimizer) + averages)
        kept = -(-numbers // self.splits) * bytes_per_element
        whole = 4 * numbers if self.is_sharded else 0
        if workload.is_full:
            whole *= 3 if self.splits > 1 else 2
        if not is_cuda:
            return Bytes(main=kept + whole)
        return Bytes(device=whole, main=kept) if self.offload else Bytes(device=kept + whole)


@dataclass(frozen=True)
class Setup:
    """The input of a plan: a run, the devices and the layout."""

    workload: Workload
    cluster: Cluster
    layout: Layout

    @property
    def is_cuda(self) -> bool:
        """Whether the devices are GPUs."""
        return self.cluster.device.is_cuda

    @cached_property
    def parts(self) -> PartLayout | None:
        """How a table on disk is cut into parts; None of one in memory."""
        workload = self.workload
        return PartLayout.of_config(workload.config, workload.num_entities, self.cluster.world_size)

    @property
    def table_rows(self) -> int:
        """Rows of the table in the memories of all ranks."""
        if self.parts is None:
            return self.workload.num_entities
        return self.cluster.world_size * self.parts.buffer_rows

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph holds the scores of a step."""
        work, ranks = self.workload, self.cluster.world_size
        return work.config.captures(self.is_cuda, ranks, work.num_features > 0)

    @property
    def place(self) -> str:
        """Memory that a rank computes in, as a field of Bytes: "device" or "main"."""
        return "device" if self.is_cuda else "main"

    @property
    def groups(self) -> list[np.ndarray]:
        """Ranks of each whole table."""
        ranks = np.arange(self.cluster.world_size)
        return np.split(ranks, len(ranks)) if self.layout.is_replicated else [ranks]

    @property
    def layout_in_words(self) -> str:
        """Sharding, kernel and cached share of the rows, such as "row_wise, fused"."""
        cached = f", cache {self.form.cache_ratio:.3g}" if self.form.cache_ratio else ""
        return f"{self.layout.sharding}, {self.form.kernel}{cached}"

    @cached_property
    def dense(self) -> DenseLayout:
        """The layout of the dense parameters."""
        return DenseLayout.of(self.workload.config.dense, self.cluster)

    @cached_property
    def form(self) -> TableForm:
        """The form of a shard's rows and optimizer state."""
        return self._form(self.workload.optimizer)

    def pieces(self, shard: Shard) -> list[tuple[str, int, TableForm]]:
        """Return the type, number of rows and form of each table's part of a shard (M)."""
        stop = shard.first_row + shard.rows
        return [
            (kind, len(range(max(ids.start, shard.first_row), min(ids.stop, stop))), form)
            for kind, ids, form in self.forms
        ]

    def rows_by_table(self, shard: Shard) -> np.ndarray:
        """Return the number of rows (M,) that a shard has of each table."""
        return np.array([rows for _, rows, _ in self.pieces(shard)])

    @cached_property
    def forms(self) -> list[tuple[str, range, TableForm]]:
        """The type, ids and form of each entity table."""
        tables = [(kind, ids, self._form(name)) for kind, ids, name in self.workload.tables]
        if self.parts is None:
            return tables
        ((kind, _, form),) = tables
        return [(kind, range(self.table_rows), form)]

    def _form(self, optimizer: str) -> TableForm:
        entities, is_replicated = self.workload.config.entities, self.layout.is_replicated
        return TableForm(
            optimizer,
            DENSE if is_replicated else UVM_CACHING if entities.cache_ratio else FUSED,
            0.0 if is_replicated else entities.cache_ratio,
            state_bytes=2 if entities.preset == "dicee" else 4,
            counts_rows=entities.preset == "dgl" and optimizer == "adam",
            state_in_main=entities.preset == "dicee",
            averages=self.workload.config.train.averages,
        )

    def check(self) -> None:
        """Check that the layout goes with the run and the devices.

        Raises:
            ConfigError: It does not; the message says why.
        """
        layout, config = self.layout, self.workload.config
        if self.workload.is_full and layout.sharding != "row_wise":
            raise ConfigError(
                f"--sharding: with negatives.regime {config.negatives.regime} every rank scores "
                "its own rows of one table; only row_wise does that"
            )
        if layout.is_replicated and config.entities.cache_ratio:
            raise ConfigError(
                "--sharding: data_parallel tables lie whole on every device; use "
                "entities.placement memory"
            )
        if config.entities.tables is not None and layout.sharding != "row_wise":
            raise ConfigError(
                f"--sharding: tables of node types are split by rows, not {layout.sharding}"
            )
        if self.is_cuda and config.entities.engine == "torchrec":
            check_cuda_dim(self.workload.dim)

    def changed(self, changes: dict[str, Any]) -> Setup:
        """Return the setup with other values.

        Args:
            changes: Values of config keys (with a dot, such as "train.batch_size") and of fields of
                the layout.

        Raises:
            ConfigError: The config or the layout does not allow a value.
        """
        settings = {key: value for key, value in changes.items() if "." in key}
        layout = {key: value for key, value in changes.items() if "." not in key}
        return Setup(
            self.workload.with_settings(settings), self.cluster, replace(self.layout, **layout)
        )
