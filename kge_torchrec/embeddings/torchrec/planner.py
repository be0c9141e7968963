"""The sharding of the entity table by TorchRec's planner, and the memory that the table needs.

Planning needs no process group and no GPU, so a laptop can plan for 64 GPUs. ``table_memory``
replaces the planner's own estimate of bytes. It follows FBGEMM's
split_table_batched_embeddings_ops_training (1.6 to 1.8): state is always float32. With rows in main
memory ("unified virtual memory", UVM), state with D elements per row is in main memory too, state
with one element per row stays on the GPU, and the cache holds values only. TorchRec's estimate
(1.8) counts the state with the element size of the values, and counts it in the cache as well.

Shapes: N entities, D elements per row, W ranks; n rows and d columns of a shard.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner import types as planner_types
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import CacheParams, ShardingPlan, ShardingType

from kge_torchrec.config import ConfigError
from kge_torchrec.data import ENTITY
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.settings import of_table, settings_of
from kge_torchrec.environment import host_memory
from kge_torchrec.errors import KGEError

MOST_CUDA_DIM = 2048  # limit of FBGEMM 1.6 to 1.8; its backward fails beyond it
MODULE = "entities"  # name of the EmbeddingCollection in the model
FUSED, UVM_CACHING, DENSE = "fused", "fused_uvm_caching", "dense"
GIB = 1 << 30
RESERVE = 0.05  # share of the memory for the scorer, activations and so on
IDS_PER_BATCH = 4096.0  # distinct entity ids that a rank looks up per step
_CACHE_WAYS = 32  # rows per set; the cache holds whole sets
UNLIMITED = 1 << 60  # bytes, for a plan whose fit is checked afterwards
SHARDINGS = tuple(
    kind.value
    for kind in (
        ShardingType.ROW_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.TABLE_WISE,
        ShardingType.DATA_PARALLEL,
    )
)


Value = TypeVar("Value")


class PlanDoesNotFit(KGEError, RuntimeError):
    """The table and its optimizer state need more memory than a rank has."""


def device_memory() -> int:
    """Return the memory of the current CUDA device in bytes, or 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def check_cuda_dim(dim: int) -> None:
    """Raise ConfigError if FBGEMM's CUDA kernels do not support rows of D elements."""
    limit = ""
    if dim % 4:
        limit = f"a multiple of 4, not {dim} (FBGEMM reads four elements at a time"
    elif dim > MOST_CUDA_DIM:
        limit = f"{MOST_CUDA_DIM:,} or less, not {dim:,} (FBGEMM's backward supports no wider rows"
    if limit:
        raise ConfigError(
            f"model.dim: on CUDA it must be {limit}; entities.engine handrolled supports any)"
        )


@dataclass(frozen=True)
class Ranks:
    """The ranks that a plan is for, and their memory.

    Attributes:
        count: Ranks in total.
        per_host: Ranks per host.
        device: "cpu" or "cuda".
        device_bytes: Memory of one GPU. None: that of the current GPU.
        host_bytes: Main memory of one host, which its ranks share. None: that of this host.
    """

    count: int
    per_host: int
    device: str
    device_bytes: int | None = None
    host_bytes: int | None = None

    def room(self) -> Bytes:
        """Return the memory of one rank for the table, without the share ``RESERVE``."""
        device = device_memory() if self.device_bytes is None else self.device_bytes
        host = host_memory() if self.host_bytes is None else self.host_bytes
        return Bytes(int(device * (1 - RESERVE)), int(host // self.per_host * (1 - RESERVE)))


def plan_row_wise(
    model: nn.Module, sharder: EmbeddingCollectionSharder, ranks: Ranks, **options: Any
) -> ShardingPlan:
    """Return the row-wise plan of ``plan_table`` over all ranks, which training uses.

    Raises:
        ConfigError: FBGEMM's CUDA kernels do not support this D.
        PlanDoesNotFit: The rows of a rank do not fit into its memory.
    """
    if ranks.device == "cuda":
        check_cuda_dim(_find_collection(model)[1].embeddings[ENTITY].weight.shape[1])
    return plan_table(model, sharder, ranks, **options)


def plan_table(
    model: nn.Module,
    sharder: EmbeddingCollectionSharder,
    ranks: Ranks,
    sharding: str = "row_wise",
    kernel: str = "fused",
    cache_ratio: float = 0.0,
    averages: int = 0,
) -> ShardingPlan:
    """Return the plan that splits the entity table of ``model`` over all ranks.

    Args:
        model: Holds one EmbeddingCollection with the table ENTITY, on the meta device.
        sharder: Its ``fused_params`` name the optimizer, whose state is counted.
        ranks: The ranks and their memory.
        sharding: One of SHARDINGS but data_parallel.
        kernel: See ``TableForm``.
        cache_ratio: Share of the rows in the cache of UVM_CACHING.
        averages: See ``TableForm``.

    Raises:
        PlanDoesNotFit: The rows of a rank do not fit into its memory. The message names the rank
            and the bytes.
    """
    name, collection = _find_collection(model)
    table = collection.embeddings[ENTITY].weight
    room = ranks.room()
    topology = _topology(ranks.count, ranks.per_host, ranks.device, room)
    optimizer = settings_of(sharder.fused_params).optimizer.name
    form = TableForm(optimizer, kernel, cache_ratio, averages=averages)
    constraints = {
        ENTITY: ParameterConstraints(
            sharding_types=[sharding],
            compute_kernels=[kernel],
            pooling_factors=[IDS_PER_BATCH],
            min_partition=-(-table.shape[1] // ranks.count),  # columns; at most one shard per rank
            cache_params=CacheParams(load_factor=cache_ratio) if cache_ratio else None,
        )
    }
    storage = _TableStorage(topology, constraints, form)
    estimators = [EmbeddingPerfEstimator(topology, constraints), storage]
    batch_size = 1  # one bag per rank with all distinct ids of the step
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=EmbeddingEnumerator(topology, batch_size, constraints, estimators),
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    try:
        with _quiet():
            return planner.plan(model, [sharder])
    except PlannerError as error:
        rows, parts = storage.largest
        need = sum(parts.values(), Bytes())
        if need.device <= room.device and need.main <= room.main:
            raise  # memory is not the problem
        raise PlanDoesNotFit(
            f"the entity table {name!r} does not fit by {sharding.split('_')[0]}s on {ranks.count} "
            f"ranks: {_shortage(rows, parts, room)}"
        ) from error


class _TableStorage(ShardEstimator):
    """A storage estimator for TorchRec's planner, based on ``table_memory``."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None,
        form: TableForm,
    ) -> None:
        self._form, self._is_cuda = form, topology.compute_device == "cuda"
        self.largest: tuple[int, dict[str, Bytes]] = (0, {})  # rows and bytes of the largest shard

    def estimate(self, sharding_options: list[ShardingOption], *_: Any, **__: Any) -> None:
        for option in sharding_options:
            for shard in option.shards:
                rows, columns = shard.size
                parts = table_memory(rows, columns, self._form, self._is_cuda)
                need = sum(parts.values(), Bytes())
                shard.storage = Storage(hbm=need.device, ddr=need.main)
                if rows > self.largest[0]:
                    self.largest = rows, parts


def _shortage(rows: int, parts: dict[str, Bytes], room: Bytes) -> str:
    """Describe what rank 0 needs, what it has, and what to do."""
    kind = "main" if sum(parts.values(), Bytes()).main > room.main else "device"
    sizes = {part: getattr(size, kind) for part, size in parts.items()}
    listed = ", ".join(f"{part} {amount(size)}" for part, size in sizes.items() if size)
    return (
        f"rank 0 gets {rows:,} rows and needs {amount(sum(sizes.values()))} ({listed}) of {kind} "
        f"memory, of which it has {amount(getattr(room, kind))}. Use more ranks, a row-wise "
        "optimizer, entities.placement disk or, on GPUs, entities.placement managed_caching; "
        "`kge-torchrec plan` computes what would fit."
    )


def _topology(world_size: int, local_world_size: int, device_type: str, room: Bytes) -> Topology:
    hbm = room.device if device_type == "cuda" else 0
    memory = {"hbm_cap_bytes": hbm, "ddr_cap_bytes": room.main}
    if not hasattr(planner_types, "TopologyFactory"):  # before TorchRec 1.8
        return Topology(
            world_size=world_size,
            local_world_size=local_world_size,
            compute_device=device_type,
            hbm_cap=memory["hbm_cap_bytes"],
            ddr_cap=memory["ddr_cap_bytes"],
        )
    return planner_types.TopologyFactory.create_topology(
        planner_types.TrainerConfig(
            world_size=world_size, local_world_size=local_world_size, **memory
        ),
        kernel_config=planner_types.KernelConfig(compute_device=device_type),
    )


def _find_collection(model: nn.Module) -> tuple[str, EmbeddingCollection]:
    return next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingCollection)
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about choices that are meant."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Bytes:
    """Bytes on the GPU and in main memory. CPU ranks use main memory only."""

    device: int = 0
    main: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.main + other.main)


@dataclass(frozen=True)
class TableForm:
    """The storage of rows and optimizer state.

    Args:
        optimizer: Name of the table's optimizer.
        kernel: FUSED (rows on the device), UVM_CACHING (rows in main memory with a cache on the
            GPU), or DENSE (data-parallel: dense gradients and torch's own optimizer).
        cache_ratio: Share of the rows in the cache of UVM_CACHING.
        state_bytes: Bytes per element of state; 2 for bfloat16 state (entities.preset dicee).
        counts_rows: Whether each row counts its steps in an int32 (entities.preset dgl).
        state_in_main: Whether all state is in main memory (entities.preset dicee).
        averages: Copies of the values that train.averaging keeps.
    """

    optimizer: str
    kernel: str = FUSED
    cache_ratio: float = 0.0
    state_bytes: int = 4
    counts_rows: bool = False
    state_in_main: bool = False
    averages: int = 0

    def row_state_bytes(self, columns: int) -> int:
        """Return the bytes of state per row of a shard."""
        per_element, row = optimizer_class(self.optimizer).state_numbers()
        return (per_element * columns + row) * self.state_bytes + (4 if self.counts_rows else 0)


def table_memory(rows: int, columns: int, form: TableForm, is_cuda: bool) -> dict[str, Bytes]:
    """Return the bytes of a shard by part.

    Args:
        rows: Rows of the shard.
        columns: Columns of the shard.
        form: Its storage.
        is_cuda: Whether the ranks use GPUs.

    Returns:
        Bytes of "weights" and "optimizer state", and of "average", "cache" or "gradients" if there
        are any.
    """
    parts = _without_average(rows, columns, form, is_cuda)
    if form.averages:
        weights = parts["weights"]
        parts["average"] = Bytes(form.averages * weights.device, form.averages * weights.main)
    return parts


def _without_average(rows: int, columns: int, form: TableForm, is_cuda: bool) -> dict[str, Bytes]:
    values = 4 * rows * columns
    if form.kernel == DENSE:
        return _dense_table(rows * columns, form, is_cuda)
    state = rows * form.row_state_bytes(columns)
    if not is_cuda:
        return {"weights": Bytes(main=values), "optimizer state": Bytes(main=state)}
    parts = {"weights": _in(form.kernel == FUSED, values)}
    _, row = optimizer_class(form.optimizer).state_numbers()
    if form.state_in_main:
        parts["optimizer state"] = Bytes(main=state)
    elif form.kernel == FUSED:
        parts["optimizer state"] = Bytes(device=state)
    else:
        by_row = rows * row * form.state_bytes
        parts["optimizer state"] = Bytes(device=by_row, main=state - by_row)
    if form.kernel == UVM_CACHING:
        parts["cache"] = Bytes(device=_cache(rows, columns, form))
    return parts


def _dense_table(numbers: int, form: TableForm, is_cuda: bool) -> dict[str, Bytes]:
    """Return the bytes of a data-parallel replica, with a gradient of the table's size.

    It uses the dense optimizer, which has no row-wise state.
    """
    return {
        "weights": _in(is_cuda, 4 * numbers),
        "optimizer state": _in(is_cuda, numbers * 4 * dense_state_numbers(form.optimizer)),
        "gradients": _in(is_cuda, 4 * numbers),
    }


def dense_state_numbers(optimizer: str) -> int:
    """Return the state elements per element of a dense parameter (no row-wise state)."""
    return len(optimizer_class(optimizer).states)


def _cache(rows: int, columns: int, form: TableForm) -> int:
    """Return the bytes of a UVM cache.

    Each slot has a row of values, an int64 id and an int64 usage counter.  Each row of the table
    has an int32 cache position.
    """
    if not rows:
        return 0
    sets = max(1, -(-int(rows * form.cache_ratio) // _CACHE_WAYS))
    slots = sets * _CACHE_WAYS
    return slots * (4 * columns + 16) + 4 * rows


def _in(on_device: bool, size: int) -> Bytes:
    return Bytes(device=size) if on_device else Bytes(main=size)


def describe_plan(plan: ShardingPlan, sharder: EmbeddingCollectionSharder) -> str:
    """Describe a plan in a few lines per table: its sharding, and the rows and bytes per rank.

    The bytes count float32 values and the optimizer state.
    """
    lines = []
    for module, tables in plan.plan.items():
        for table, sharding in tables.items():
            own = settings_of(of_table(sharder.fused_params, table))
            form = TableForm(own.optimizer.name)
            shards = sharding.sharding_spec.shards
            lines.append(
                f"{module}.{table}: {sharding.sharding_type}, kernel {sharding.compute_kernel}, "
                f"{len(shards)} shards"
            )
            rows = [shard.shard_sizes[0] for shard in shards]
            dim = shards[0].shard_sizes[1]
            row_bytes = 4 * dim + form.row_state_bytes(dim)
            where, cached = "", sharding.cache_params
            if cached is not None:
                where = f" in main memory, {cached.load_factor:.3g} of the rows cached on the GPU"
            for first, last, count in runs(rows):
                ranks, size = ranks_text(first, last), amount(count * row_bytes)
                lines.append(f"  {ranks}: {count:,} rows x {dim}, {size} each{where}")
    return "\n".join(lines)


def runs(values: Sequence[Value]) -> Iterator[tuple[int, int, Value]]:
    """Yield (first, last, value) for each run of equal neighbors."""
    first = 0
    for at in range(1, len(values) + 1):
        if at == len(values) or values[at] != values[first]:
            yield first, at - 1, values[first]
            first = at


def ranks_text(first: int, last: int) -> str:
    """Return "rank 3" or "ranks 0-6"."""
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def amount(size: float) -> str:
    """Format a number of bytes with a suitable unit, such as "96.11 GiB"."""
    if size >= 10 << 40:
        return f"{size / (1 << 40):.2f} TiB"
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit / 10:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"
