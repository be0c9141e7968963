"""The row-wise plan of the entity table, and the memory that the table needs.

Planning needs no process group and no GPU, so a laptop can plan for 64 GPUs. ``table_memory``
follows FBGEMM's split_table_batched_embeddings_ops_training (1.6 to 1.8): state is always float32.
With rows in main memory ("unified virtual memory", UVM), state with D elements per row is in main
memory too, state with one element per row stays on the GPU, and the cache holds values only.

Shapes: N entities, D elements per row, W ranks; n rows and d columns of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import CacheParams, ShardingPlan

from kge_torchrec.config import ConfigError
from kge_torchrec.data import ENTITY
from kge_torchrec.distributed.processes import rows_by_rank
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.shard import EntityTable
from kge_torchrec.environment import host_memory
from kge_torchrec.errors import KGEError
from kge_torchrec.tables import amount as amount

MOST_CUDA_DIM = 2048  # limit of FBGEMM 1.6 to 1.8; its backward fails beyond it
MODULE = "entities"  # name of the EmbeddingCollection in the model
FUSED, UVM_CACHING, DENSE = "fused", "fused_uvm_caching", "dense"
GIB = 1 << 30
RESERVE = 0.05  # share of the memory for the scorer, activations and so on
_CACHE_WAYS = 32  # rows per set; the cache holds whole sets
SHARDINGS = ("row_wise", "column_wise", "table_wise", "data_parallel")


class PlanDoesNotFit(KGEError, RuntimeError):
    """The table and its optimizer state need more memory than a rank has."""


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
        device = self.device_bytes
        if device is None and torch.cuda.is_available():
            device = torch.cuda.get_device_properties().total_memory
        host = host_memory() if self.host_bytes is None else self.host_bytes
        return Bytes(int((device or 0) * (1 - RESERVE)), int(host // self.per_host * (1 - RESERVE)))


def plan_rows(
    collection: EmbeddingCollection,
    sharder: EmbeddingCollectionSharder,
    tables: Sequence[EntityTable],
    ranks: Ranks,
    kernel: str = FUSED,
    cache_ratio: float = 0.0,
    averages: int = 0,
) -> ShardingPlan:
    """Return the plan that splits the rows of the entity tables over all ranks.

    Args:
        collection: Holds all rows as one table, ENTITY, on the meta device.
        sharder: Its sharder.
        tables: The entity tables.
        ranks: The ranks and their memory.
        kernel: See ``TableForm``.
        cache_ratio: Share of the rows in the cache of UVM_CACHING.
        averages: See ``TableForm``.

    Raises:
        ConfigError: FBGEMM's CUDA kernels do not support this D.
        PlanDoesNotFit: The rows of a rank do not fit into its memory. The message names the rank
            and the bytes.
    """
    dim, is_cuda = collection.embedding_dim(), ranks.device == "cuda"
    if is_cuda:
        check_cuda_dim(dim)
    room = ranks.room()
    for rank, block in enumerate(rows_by_rank(tables[-1].ids.stop, ranks.count)):
        parts: dict[str, Bytes] = {}
        for table in tables:  # a type may have several
            form = TableForm(table.optimizer.name, kernel, cache_ratio, averages=averages)
            rows = len(table.within(block.start, block.stop))
            for part, size in table_memory(rows, dim, form, is_cuda).items():
                name = part if len(tables) == 1 else table.type
                parts[name] = parts.get(name, Bytes()) + size
        need = sum(parts.values(), Bytes())
        for kind, have in (("main", room.main), ("device", room.device)):
            if getattr(need, kind) > have:
                sizes = {part: getattr(size, kind) for part, size in parts.items()}
                listed = ", ".join(f"{part} {amount(size)}" for part, size in sizes.items() if size)
                raise PlanDoesNotFit(
                    f"the entity table does not fit by rows on {ranks.count} ranks: rank {rank} "
                    f"gets {len(block):,} rows and needs {amount(sum(sizes.values()))} ({listed}) "
                    f"of {kind} memory, of which it has {amount(have)}. Use more ranks, a row-wise "
                    "optimizer, entities.placement disk or, on GPUs, entities.placement "
                    "managed_caching; `kge-torchrec plan` computes what would fit."
                )
    split = {ENTITY: row_wise(compute_kernel=kernel)}
    plan = construct_module_sharding_plan(
        collection, split, sharder, ranks.per_host, ranks.count, ranks.device
    )
    if cache_ratio:
        plan[ENTITY].cache_params = CacheParams(load_factor=cache_ratio)
    return ShardingPlan({MODULE: plan})


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
    """Return the bytes of a shard of some rows and columns, by part.

    The parts are "weights" and "optimizer state", and "average", "cache" or "gradients" if it has
    any.
    """
    values = 4 * rows * columns
    cached = is_cuda and form.kernel == UVM_CACHING
    on_device = is_cuda and not cached

    def at(size: int, on_device: bool = on_device) -> Bytes:
        return Bytes(device=size) if on_device else Bytes(main=size)

    if form.kernel == DENSE:
        state = values * dense_state_numbers(form.optimizer)
    else:
        state = rows * form.row_state_bytes(columns)
    parts = {
        "weights": at(values),
        "optimizer state": at(state, on_device and not form.state_in_main),
    }
    if cached:
        by_row = rows * optimizer_class(form.optimizer).state_numbers()[1] * form.state_bytes
        parts["optimizer state"] = Bytes(device=by_row, main=state - by_row)
        # Each slot has a row of values, an int64 id and an int64 usage counter.  Each row of the
        # table has an int32 cache position.
        sets = max(1, -(-int(rows * form.cache_ratio) // _CACHE_WAYS)) if rows else 0
        parts["cache"] = Bytes(device=sets * _CACHE_WAYS * (4 * columns + 16) + 4 * rows)
    if form.kernel == DENSE:
        parts["gradients"] = at(values)
    if form.averages:
        parts["average"] = at(form.averages * values)
    return parts


def dense_state_numbers(optimizer: str) -> int:
    """Return the state elements per element of a dense parameter (no row-wise state)."""
    return len(optimizer_class(optimizer).states)
