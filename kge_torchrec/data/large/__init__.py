"""Graphs that memory does not hold: how large one is before it is read, and what it depends on.

`on_disk.py` prepares a store of it in stages, which a later start can resume: `labels.py` (labels
to ids), `rows.py` (repeats and splits), `index.py` (the filter index), `work.py` (their folder).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kge_torchrec.data.streams import decompressed
from kge_torchrec.environment import host_memory
from kge_torchrec.errors import DataError

log = logging.getLogger(__name__)

GIB = 1 << 30
LEAST = 2.0  # GiB: the program, pyarrow's reader and a few batches take one
IN_MEMORY = 80  # bytes per triple of a preparation in memory, besides 0.5 GiB; measured
VERSION = 2  # of the files of a preparation on disk


@dataclass(frozen=True)
class Estimate:
    """The size of a graph, from the beginning of its files.

    Args:
        triples: Number of triples.
        text: Bytes of text, without compression.
    """

    triples: int = 0
    text: int = 0

    @property
    def in_memory(self) -> float:
        """GiB that a preparation in memory takes, about."""
        return 0.5 + IN_MEMORY * self.triples / GIB

    @classmethod
    def of(cls, files: Mapping[str, Sequence[Path]]) -> Estimate:
        """Return the size of the triples of some files."""
        parts = [_estimate(path) for paths in files.values() for path in paths]
        return cls(sum(part.triples for part in parts), sum(part.text for part in parts))


def _estimate(path: Path) -> Estimate:
    """Return the size of a file; of one that cannot be read, whose reader says why, nothing."""
    if not path.is_file():
        return Estimate()
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        try:
            rows = pq.read_metadata(path).num_rows
        except (OSError, ValueError):
            rows = 0
        return Estimate(rows, 30 * rows)
    try:
        size = path.stat().st_size
        with path.open("rb") as file, decompressed(file, path) as stream:
            start = stream.read(1 << 22)
            read = file.tell()
    except (OSError, ValueError):
        return Estimate()
    # What was read of the file has given the text so far.
    text = round(size * len(start) / max(1, read))
    return Estimate(round(text * start.count(b"\n") / max(1, len(start))), text)


def bound(memory: float | None) -> float:
    """Return the bound of memory in GiB; None stands for half of this machine's.

    Raises:
        DataError: The bound is too small.
    """
    if memory is None:
        return max(LEAST, round(host_memory() / GIB / 2, 1))
    if not memory >= LEAST:
        raise DataError(f"memory must be at least {LEAST:g} GiB, got {memory:g}")
    return memory


def is_large(
    files: Mapping[str, Sequence[Path]], memory: float | None, held: Sequence[str]
) -> bool:
    """Return whether files are prepared on disk, since memory is not to hold their triples.

    Args:
        files: Files by split.
        memory: See `bound`.
        held: Options that need all triples in memory; if there are some, a warning says so.
    """
    most, size = bound(memory), Estimate.of(files)
    if size.in_memory <= most:
        return False
    if held:
        log.warning(
            f"about {size.triples:,} triples are prepared in memory, since {' and '.join(held)} "
            f"cannot be on disk; this takes about {size.in_memory:,.0f} GiB"
        )
    return not held


def key_of(files: Mapping[str, Sequence[Path]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a store depends on: files with their sizes and times, and options."""
    sources = [
        [split, str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        for split, paths in files.items()
        for path in paths
    ]
    return {"version": VERSION, "sources": sources, **options}
