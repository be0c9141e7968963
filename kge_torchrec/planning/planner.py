"""Where the rows of the entity table go, and whether they fit: TorchRec's planner, asked quietly.

Needs no process group and no GPU, so a plan for 64 GPUs can be looked at on a laptop.

Shapes: N entities, D numbers per entity, W ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingCollection
from torchrec import optim as torchrec_optim
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner import types as planner_types
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import CacheParams, ShardingPlan, ShardingType

from kge_torchrec.data.batches import ENTITY

GIB = 1 << 30

# The optimizer classes by which TorchRec's planner knows how much state a table has.
_PLANNER_OPTIMIZERS = {
    EmbOptimType.ADAM: torchrec_optim.Adam,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: torchrec_optim.PartialRowWiseAdam,
    EmbOptimType.EXACT_ADAGRAD: torchrec_optim.Adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: torchrec_optim.RowWiseAdagrad,
    EmbOptimType.EXACT_SGD: torchrec_optim.SGD,
}


class PlanDoesNotFit(RuntimeError):
    """The table and its optimizer state need more memory than a rank has."""


def device_memory() -> int:
    """Bytes of the current CUDA device, or 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def host_memory() -> int:
    """Bytes of main memory of this machine, or of the container it runs in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))


def plan_row_wise(
    model: nn.Module,
    sharder: EmbeddingCollectionSharder,
    world_size: int,
    local_world_size: int,
    device_type: str,
    *,
    kernel: str = "fused",
    cache_load_factor: float | None = None,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    reserve: float = 0.05,
    ids_per_batch: int = 4096,
    process_group: dist.ProcessGroup | None = None,
) -> ShardingPlan:
    """The plan that splits the entity table of ``model`` by rows over all ranks.

    Args:
        model: holds one EmbeddingCollection with the table ENTITY, on the meta device.
        sharder: its ``fused_params`` say which optimizer state to count.
        world_size, local_world_size: ranks in all, and on one machine.
        device_type: "cpu" or "cuda".
        kernel: "fused" (rows on the device), "fused_uvm" (rows in main memory) or
            "fused_uvm_caching" (main memory with a cache on the device).
        cache_load_factor: share of the rows that the cache of fused_uvm_caching holds.
        device_bytes: memory of one GPU; default, the current one's.
        host_bytes: main memory of one machine, which its ranks share; default, this one's.
        reserve: share of the memory to keep for everything else (scorer, activations).
        ids_per_batch: distinct entity ids that a rank looks up in a step.
        process_group: if given, rank 0 plans and sends its plan to all (a collective call).

    Raises PlanDoesNotFit, saying which rank and how many bytes, if a rank's rows do not fit, and
    ValueError for a D that FBGEMM's CUDA kernels cannot have.
    """
    name, collection = _find_collection(model)
    if device_type == "cuda" and _entity_shape(collection)[1] % 4:
        raise ValueError(
            f"on CUDA the numbers per entity must be a multiple of 4, not "
            f"{_entity_shape(collection)[1]} (FBGEMM reads four at a time)"
        )
    host = (host_memory() if host_bytes is None else host_bytes) // local_world_size
    device = device_memory() if device_bytes is None else device_bytes
    constraints = ParameterConstraints(
        sharding_types=[ShardingType.ROW_WISE.value],
        compute_kernels=[kernel],
        pooling_factors=[float(ids_per_batch)],
        cache_params=CacheParams(load_factor=cache_load_factor) if cache_load_factor else None,
    )
    planner = EmbeddingShardingPlanner(
        topology=_topology(world_size, local_world_size, device_type, device, host),
        batch_size=1,  # one bag a rank, which holds the step's distinct ids
        constraints={ENTITY: constraints},
        storage_reservation=FixedPercentageStorageReservation(reserve),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    with _optimizer_counted(collection, sharder):
        try:
            if process_group is not None:
                return planner.collective_plan(model, [sharder], process_group)
            return planner.plan(model, [sharder])
        except PlannerError as error:
            on_host = device_type == "cpu" or kernel != "fused"
            have = int((host if on_host else device) * (1 - reserve))
            table, state = _row_bytes(collection, sharder)
            rows = -(-_entity_shape(collection)[0] // world_size)
            if rows * (table + state) <= have:
                raise  # some other complaint
            raise PlanDoesNotFit(
                f"the entity table {name!r} does not fit by rows on {world_size} ranks: rank 0 "
                f"gets {rows:,} rows and needs {_amount(rows * (table + state))} (values "
                f"{_amount(rows * table)}, optimizer state {_amount(rows * state)}) of "
                f"{'main' if on_host else 'device'} memory, of which it has {_amount(have)}. "
                "Use more ranks, a row-wise optimizer, 16-bit values or, on GPUs, the kernel "
                "fused_uvm_caching."
            ) from error


def describe_plan(plan: ShardingPlan, sharder: EmbeddingCollectionSharder | None = None) -> str:
    """A few lines for people: per table its sharding, rows and bytes of every rank.

    Bytes are those of float32 values, with the optimizer's state if ``sharder`` is given.
    """
    lines = []
    for module, tables in plan.plan.items():
        for table, sharding in tables.items():
            shards = sharding.sharding_spec.shards
            lines.append(
                f"{module}.{table}: {sharding.sharding_type}, kernel {sharding.compute_kernel}, "
                f"{len(shards)} shards"
            )
            rows = [shard.shard_sizes[0] for shard in shards]
            dim = shards[0].shard_sizes[1]
            row_bytes = 4 * dim + (_state_bytes(sharder, dim) if sharder else 0)
            for first, last, count in _runs(rows):
                ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
                lines.append(
                    f"  {ranks}: {count:,} rows x {dim}, {_amount(count * row_bytes)} each"
                )
    return "\n".join(lines)


def _topology(
    world_size: int, local_world_size: int, device_type: str, device: int, host: int
) -> Topology:
    memory = {"hbm_cap_bytes": device if device_type == "cuda" else 0, "ddr_cap_bytes": host}
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
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingCollection) and ENTITY in module.embeddings
    ]
    if len(found) != 1:
        raise ValueError(
            f"expected one EmbeddingCollection with the table {ENTITY!r}, found {len(found)}"
        )
    return found[0]


@contextmanager
def _optimizer_counted(
    collection: EmbeddingCollection, sharder: EmbeddingCollectionSharder
) -> Iterator[None]:
    """The planner counts optimizer state only of an optimizer that stands on the parameter."""
    weight = collection.embeddings[ENTITY].weight
    name = (sharder.fused_params or {}).get("optimizer")
    if name not in _PLANNER_OPTIMIZERS or hasattr(weight, "_optimizer_classes"):
        yield
        return
    weight._optimizer_classes = [_PLANNER_OPTIMIZERS[name]]
    try:
        yield
    finally:
        del weight._optimizer_classes


def _entity_shape(collection: EmbeddingCollection) -> torch.Size:
    return collection.embeddings[ENTITY].weight.shape


def _row_bytes(
    collection: EmbeddingCollection, sharder: EmbeddingCollectionSharder
) -> tuple[int, int]:
    """(bytes of one row's values, bytes of its optimizer state)."""
    dim = _entity_shape(collection)[1]
    size = collection.embeddings[ENTITY].weight.element_size()
    return dim * size, _state_bytes(sharder, dim)


def _state_bytes(sharder: EmbeddingCollectionSharder, dim: int) -> int:
    numbers = {
        EmbOptimType.ADAM: 2 * dim,
        EmbOptimType.PARTIAL_ROWWISE_ADAM: dim + 1,
        EmbOptimType.EXACT_ADAGRAD: dim,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD: 1,
    }
    return 4 * numbers.get((sharder.fused_params or {}).get("optimizer"), 0)


def _runs(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first rank, last rank, rows) of neighbours with equally many rows."""
    first = 0
    for rank in range(1, len(counts) + 1):
        if rank == len(counts) or counts[rank] != counts[first]:
            yield first, rank - 1, counts[first]
            first = rank


def _amount(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit / 10:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
