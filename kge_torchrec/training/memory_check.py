"""A check that no tensor of a run exceeds the memory, with its average, before any work is done."""

from __future__ import annotations

from pathlib import Path

import torch

from kge_torchrec.config import Config, ConfigError, GraphSize
from kge_torchrec.config.registry import resolve
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.environment import host_memory

_FLOAT = 4  # bytes
_TABLE = "the entity table"


def check_memory(config: Config, graph: GraphSize, processes: Processes) -> None:
    """Check that every single tensor of a run fits into the memory of a rank.

    These are lower bounds.  The planner has exact figures, but takes as long as building the model.

    Args:
        config: The config, with a number for every key that may be null.
        graph: Size of the graph.
        processes: The ranks of the run.

    Raises:
        ConfigError: A tensor is larger than the memory.
    """
    have = _memory_per_rank(processes)
    on_cuda = processes.device.type == "cuda"
    for key, what, size in _largest(config, graph, processes.world_size, on_cuda):
        if size > have:
            raise ConfigError(
                f"{key}: {what} would take {size / 2**30:,.0f} GiB per rank, which has "
                f"{have / 2**30:,.0f} GiB; choose a smaller value{_or_disk(config, what)}"
            )


def _or_disk(config: Config, what: str) -> str:
    return ", or entities.placement disk" if what == _TABLE and not config.entities.on_disk else ""


def _largest(
    config: Config, graph: GraphSize, world_size: int, on_cuda: bool
) -> list[tuple[str, str, int]]:
    """Return (key, description, bytes per rank) of tensors that one key can make too large."""
    dim, negatives = config.model.dim, config.negatives
    scorer = resolve("scorer", config.model.scorer)
    options = scorer.Options(**config.model.scorer_options())
    inverses = 2 if config.model.reciprocal else 1
    relations = graph.relations * inverses * scorer.relation_dim(dim, options)
    tensors = [("model.dim", "the table of relations", relations)]
    if not on_cuda:  # on CUDA a plan may place the entity table in main memory
        layout = PartLayout.of_config(config, graph.rows, world_size)
        table, what = graph.rows * dim // world_size, _TABLE
        if layout is not None:  # two parts are on their way
            table = (layout.buffer_rows + 2 * layout.part_rows) * dim
            what = "the parts in memory"
        tensors.insert(0, ("model.dim", what, table))
        if copies := config.train.averages:
            all_copies = (1 + copies) * table
            tensors.append(("train.averaging", "the entity table and its average", all_copies))
    if not negatives.is_full:
        rows = min(negatives.count, graph.entities) * dim
        batch = min(config.train.batch_size, graph.triples) // world_size
        tensors += [
            ("negatives.count", "the rows of the candidates", rows),
            ("negatives.count", "the scores of a batch", batch * negatives.count),
            ("negatives.count", "the ids of the candidates", 2 * negatives.count),
        ]
    return [(key, what, _FLOAT * elements) for key, what, elements in tensors]


def _memory_per_rank(processes: Processes) -> int:
    if processes.device.type == "cuda":
        return torch.cuda.get_device_properties(processes.device).total_memory
    return host_memory() // processes.local_world_size


def available_memory() -> int:
    """Return the bytes of main memory that tensors can still take here, without swap."""
    stats = Path("/proc/meminfo")
    if not stats.exists():
        return host_memory()
    free = _numbers(stats)["MemAvailable:"] << 10
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        kept = _numbers(group / "memory.stat")  # pages of files, which the kernel gives up
        files = kept.get("inactive_file", 0) + kept.get("active_file", 0)
        free = min(free, int(text) - int(used.read_text()) + files)
    return max(0, free)


def _numbers(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {name: int(number) for name, number, *_ in lines}
