"""Memory and initial values of the entity table.

Initial values are a function of (seed, global row), so they do not depend on ranks, threads or
device.  Rows are drawn in chunks of 65,536 with a random stream each; a rank that holds the middle
of a chunk draws it from its beginning.

Tables and their state in main memory use 2-MiB pages where the kernel has them: a step touches rows
scattered over gigabytes, and finding the address of a row takes as long as reading it.  With
torch's own switch (THP_MEM_ALLOC_ENABLE), which aligns temporaries too, one rank grew by 0.5 GB.

Shapes: n rows on this rank, D elements per row.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config import ModelConfig
from kge_torchrec.embeddings.entity_shard import EntityShard

CHUNK_ROWS = 1 << 16
_STREAM = 0xE7717  # separates these random streams from others with the same seed


@dataclass(frozen=True)
class EntityInit:
    """The distribution of the initial values of entity rows.

    Args:
        distribution: ``normal`` has standard deviation ``scale``; ``uniform`` covers
            [-scale, scale).  The Xavier forms (Glorot and Bengio 2010) treat a row as a layer with
            D outputs and no inputs, as PyKEEN does: ``xavier_normal`` has standard deviation
            scale * sqrt(2 / D), ``xavier_uniform`` the bound scale * sqrt(6 / D).
        scale: Scale or gain of the distribution.
        zero_columns: Number of elements at the end of a row that are 0 instead.
    """

    distribution: str = "normal"
    scale: float = 0.1
    zero_columns: int = 0

    @classmethod
    def of(cls, model: ModelConfig, zero_columns: int) -> EntityInit:
        """Return the distribution that model.init and model.init_scale name."""
        return cls(model.init, model.init_scale, zero_columns)

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        """Fill ``out``, (..., D) float32, with random values from the stream."""
        _DRAWS[self.distribution](stream, out, self.scale)


def _draw_normal(stream: np.random.Generator, out: np.ndarray, deviation: float) -> None:
    stream.standard_normal(out=out, dtype=np.float32)
    out *= np.float32(deviation)


def _draw_uniform(stream: np.random.Generator, out: np.ndarray, bound: float) -> None:
    stream.random(out=out, dtype=np.float32)
    out -= np.float32(0.5)
    out *= np.float32(2 * bound)


_DRAWS = {
    "normal": _draw_normal,
    "uniform": _draw_uniform,
    "xavier_normal": lambda stream, out, gain: _draw_normal(
        stream, out, gain * math.sqrt(2 / out.shape[1])
    ),
    "xavier_uniform": lambda stream, out, gain: _draw_uniform(
        stream, out, gain * math.sqrt(6 / out.shape[1])
    ),
}


def fill_rows(shard: EntityShard, seed: int, init: EntityInit, ids: range | None = None) -> None:
    """Write the initial values of this rank's rows into the table, without communication.

    Values are drawn in float32 on the CPU, with torch's number of threads, and copied to the
    device of the table.  Each thread needs memory for at most one chunk (65,536 x D x 4 bytes).

    Args:
        shard: The rows to fill, (n, D).
        seed: Seed of the random streams.
        init: The distribution.
        ids: The entities whose rows are filled; None for all.
    """
    start, stop = shard.row_range
    if ids is not None:
        start, stop = max(start, ids.start), min(stop, ids.stop)
    chunks = range(start // CHUNK_ROWS, -(-stop // CHUNK_ROWS) if stop > start else 0)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # drawing releases the GIL
        for _ in pool.map(
            lambda chunk: _fill_chunk(shard, seed, chunk, init, (start, stop)), chunks
        ):
            pass  # iterating raises the exceptions of the threads


@torch.no_grad()  # grad mode is per thread
def _fill_chunk(
    shard: EntityShard, seed: int, chunk: int, init: EntityInit, ids: tuple[int, int]
) -> None:
    begin = chunk * CHUNK_ROWS
    low, high = max(begin, ids[0]), min(begin + CHUNK_ROWS, ids[1])
    target = shard.rows[low - shard.first_row : high - shard.first_row]
    in_place = low == begin and target.device.type == "cpu" and target.dtype == torch.float32
    if in_place and target.is_contiguous():
        values = target.numpy()
    else:
        values = np.empty((high - begin, shard.dim), np.float32)
    seeds = np.random.SeedSequence((seed, _STREAM, chunk))
    init.draw(np.random.Generator(np.random.SFC64(seeds)), values)
    values[:, shard.dim - init.zero_columns :] = 0
    if not in_place or not target.is_contiguous():
        target.copy_(torch.from_numpy(values[low - begin :]))


def zeros_on_huge_pages(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Return zeros.  On the CPU, pages take memory only once they are first touched."""
    size = prod(shape) * dtype.itemsize
    on_linux = hasattr(mmap, "MADV_HUGEPAGE")
    if not size or not on_linux or torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may be built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
