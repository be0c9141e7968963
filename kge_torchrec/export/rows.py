"""The entity table on its way to rank 0, one chunk of rows after another.

Shapes: N entities, D numbers per entity, m rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.entities.shard import EntityShard
from kge_torchrec.parallel.processes import Processes

CHUNK_ROWS = 1 << 16


@torch.no_grad()
def chunks_on_first_rank(
    shard: EntityShard, processes: Processes
) -> Iterator[tuple[int, np.ndarray | None]]:
    """Yields (global id of the first row, rows (m, D) float32), in order of id, m <= 65,536.

    Collective: every rank goes through all chunks; the rows are None on the others.  They are
    valid until the next chunk.  Rows travel from the rank that holds them straight to rank 0, which
    keeps every bit (a sum over the ranks would turn -0.0 into 0.0); beside its shard rank 0 holds
    one chunk, the others at most a copy of their part of it.
    """
    ranges = _row_ranges(shard, processes)
    buffer = None
    if processes.is_first:
        height = min(CHUNK_ROWS, shard.num_entities)
        buffer = torch.empty(height, shard.dim, device=shard.rows.device)
    for first in range(0, shard.num_entities, CHUNK_ROWS):
        stop = min(first + CHUNK_ROWS, shard.num_entities)
        chunk = None if buffer is None else buffer[: stop - first]
        for owner, (low, high) in enumerate(ranges):
            low, high = max(low, first), min(high, stop)
            if low < high:
                part = None if chunk is None else chunk[low - first : high - first]
                _move(shard, processes, owner, low, high, part)
        yield first, None if chunk is None else chunk.cpu().numpy()


def _row_ranges(shard: EntityShard, processes: Processes) -> list[tuple[int, int]]:
    """The ids [start, stop) of every rank."""
    if processes.world_size == 1:
        return [shard.row_range]
    mine = torch.tensor(shard.row_range, device=shard.rows.device)
    ranges = [torch.empty_like(mine) for _ in range(processes.world_size)]
    dist.all_gather(ranges, mine, group=processes.group)
    return [tuple(one.tolist()) for one in ranges]


def _move(
    shard: EntityShard, processes: Processes, owner: int, low: int, high: int, part: Tensor | None
) -> None:
    """The rows [low, high) of the rank ``owner`` into ``part`` on rank 0."""
    if processes.rank == owner:
        rows = shard.rows[low - shard.first_row : high - shard.first_row]
        if part is not None:
            part.copy_(rows)
        else:
            dist.send(rows.float().contiguous(), 0, group=processes.group)
    elif part is not None:
        dist.recv(part, owner, group=processes.group)
