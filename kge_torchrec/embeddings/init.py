"""The start of the entity table: memory for it, and values as a function of (seed, global row).

Any number of ranks and threads, on any device, starts from the same table.  The rows are drawn in
chunks of 65,536; every chunk has a stream of its own, and a rank that holds the middle of a chunk
draws it from its beginning.

Main memory for tables is on 2-MiB pages where the kernel has them.  Touched rows lie scattered over
gigabytes: with small pages finding a row's address takes as long as reading it.  Only tables and
their state lie like this: torch's own switch for huge pages (THP_MEM_ALLOC_ENABLE) also aligns the
temporaries of a step to 2 MiB, which glibc then cannot fit into the holes that earlier ones left,
and a rank was seen to grow by half a gigabyte.

Shapes: n rows on this rank, D numbers per entity.
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

from kge_torchrec.embeddings.backend import EntityShard

CHUNK_ROWS = 1 << 16
_STREAM = 0xE7717  # keeps these streams apart from others that are drawn with the same seed


@dataclass(frozen=True)
class EntityInit:
    """How entity rows are drawn.

    ``normal`` has standard deviation ``scale``, ``uniform`` lies in [-scale, scale).  The xavier
    forms look at one row as a layer with D outputs and no input (as PyKEEN does), with ``scale``
    as gain: standard deviation scale * sqrt(2 / D), for uniform the bound scale * sqrt(6 / D).

    zero_columns: so many numbers at the end of a row are 0 instead.

    Raises ValueError, naming the field, for an unknown distribution or a scale that is no finite
    number >= 0.
    """

    distribution: str = "normal"
    scale: float = 0.1
    zero_columns: int = 0

    def __post_init__(self) -> None:
        if self.distribution not in _DRAWS:
            raise ValueError(f"distribution: {self.distribution!r} is none of {', '.join(_DRAWS)}")
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise ValueError(f"scale: {self.scale} is not a finite number >= 0")

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        """Fills ``out``, float32 rows of D numbers in its last axis, from the stream."""
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


def fill_rows(shard: EntityShard, seed: int, init: EntityInit) -> None:
    """Writes the initial values of this rank's rows into the table; no communication.

    Draws in float32 on the CPU, in as many threads as torch has, then copies to where the rows
    are; beyond the table it needs at most one chunk (65,536 x D x 4 bytes) for each thread.
    """
    start, stop = shard.row_range
    chunks = range(start // CHUNK_ROWS, -(-stop // CHUNK_ROWS) if stop > start else 0)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # drawing releases Python's lock
        for _ in pool.map(lambda chunk: _fill_chunk(shard, seed, chunk, init), chunks):
            pass  # what a thread raised is raised here


@torch.no_grad()  # which every thread has for itself
def _fill_chunk(shard: EntityShard, seed: int, chunk: int, init: EntityInit) -> None:
    begin = chunk * CHUNK_ROWS
    start, stop = shard.row_range
    low, high = max(begin, start), min(begin + CHUNK_ROWS, stop)
    target = shard.rows[low - start : high - start]
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
    """Zeros; on the CPU their memory is taken as it is first touched."""
    size = prod(shape) * dtype.itemsize
    on_linux = hasattr(mmap, "MADV_HUGEPAGE")
    if not size or not on_linux or torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
