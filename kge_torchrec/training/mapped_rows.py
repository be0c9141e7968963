"""Rows of a table in files, as one tensor: mapped into memory one file after another.

The kernel reads a page of the files when it is first used, and drops it when memory is needed.  A
table larger than memory is therefore ranked, queried and exported like any other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kge_torchrec.data.parts import PAGE
from kge_torchrec.training.checkpoint_index import (
    Damaged,
    Index,
    bytes_of,
    dtype_of,
    entry_of,
    in_threads,
    pieces_with,
    read_piece,
    read_rows,
)

_RESERVED = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
_FIXED = 0x10  # MAP_FIXED of Linux and macOS, which Python does not name


@dataclass(frozen=True)
class Run:
    """Consecutive rows in a file.

    Args:
        file: The file.
        start: Their first byte in it.
        first_row: Number of the first row in the table.
        rows: Number of rows.
    """

    file: Path
    start: int
    first_row: int
    rows: int

    @property
    def end_row(self) -> int:
        """Number of the row after the last one."""
        return self.first_row + self.rows


def runs_of(folder: Path, index: Index, name: str) -> list[Run]:
    """Return the runs of rows of a tensor (N, D) of a checkpoint, in order.

    Raises:
        Damaged: The checkpoint does not have the tensor.
    """
    entry, runs = entry_of(index, name), list[Run]()
    row_bytes = dtype_of(entry).itemsize * entry["size"][1]
    for piece in pieces_with(index, name, range(entry["size"][0])):
        run = Run(folder / piece["file"], piece["start"], piece["offset"][0], piece["size"][0])
        before = runs[-1] if runs else None
        if (
            before is not None
            and before.file == run.file
            and before.start + before.rows * row_bytes == run.start
            and before.end_row == run.first_row
        ):
            runs[-1] = Run(before.file, before.start, before.first_row, before.rows + run.rows)
        else:
            runs.append(run)
    return runs


def read_or_map(folder: Path, index: Index, name: str, rows: range, dim: int) -> Tensor:
    """Return float32 rows of a tensor (N, D) of a checkpoint: mapped, or read if they cannot be.

    Raises:
        Damaged: The checkpoint lacks rows, or a piece does not match its checksum.
    """
    runs = runs_of(folder, index, name)
    if can_map(runs, 4 * dim):
        mapped = map_rows(runs, rows, dim)
        check_pieces(folder, index, name, rows, mapped)
        return mapped
    read = torch.empty(len(rows), dim)
    read_rows(folder, index, name, rows, read)
    return read


def can_map(runs: list[Run], row_bytes: int) -> bool:
    """Return whether the runs fill their pages, so that they can be mapped one after another."""
    ends = all(run.rows * row_bytes % PAGE == 0 for run in runs[:-1])
    return hasattr(mmap, "MAP_PRIVATE") and ends and all(run.start % PAGE == 0 for run in runs)


def map_rows(runs: list[Run], rows: range, dim: int) -> Tensor:
    """Map float32 rows of a table; what is written to them changes no file.

    Args:
        runs: Runs that hold the rows, in order, see ``can_map``.
        rows: The rows to map.
        dim: D.

    Returns:
        (len(rows), D) float32.

    Raises:
        Damaged: The runs do not have all rows.
        OSError: A file cannot be mapped.
    """
    width = 4 * dim
    if not len(rows):
        return torch.empty(0, dim)
    wanted = _joined(runs, rows)
    lead = (rows.start - wanted[0].first_row) * width  # bytes of the first run before the rows
    skipped = lead // PAGE * PAGE
    size = lead - skipped + len(rows) * width
    base = _mmap(None, size, mmap.PROT_READ, _RESERVED | mmap.MAP_ANONYMOUS, -1, 0)
    memory = (ctypes.c_char * size).from_address(base)
    weakref.finalize(memory, _libc().munmap, ctypes.c_void_p(base), ctypes.c_size_t(size))
    place = 0
    for run in wanted:
        offset = skipped if run is wanted[0] else 0
        length = min(run.rows * width - offset, size - place)
        handle = os.open(run.file, os.O_RDONLY)
        try:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            _mmap(base + place, length, access, _RESERVED | _FIXED, handle, run.start + offset)
        finally:
            os.close(handle)
        place += length
    start = lead - skipped
    return torch.frombuffer(memory, dtype=torch.float32, offset=start).view(len(rows), dim)


def _joined(runs: list[Run], rows: range) -> list[Run]:
    """Return the runs that hold some rows, in order.

    Raises:
        Damaged: There is a gap between them, before or behind them.
    """
    wanted = [run for run in runs if run.first_row < rows.stop and run.end_row > rows.start]
    holds = bool(wanted) and wanted[0].first_row <= rows.start and wanted[-1].end_row >= rows.stop
    if not holds or any(one.end_row != two.first_row for one, two in pairwise(wanted)):
        raise Damaged(f"the files lack rows of the table from {rows.start:,} to {rows.stop:,}")
    return wanted


def check_pieces(folder: Path, index: Index, name: str, rows: range, mapped: Tensor) -> None:
    """Check the checksums of all pieces that hold some mapped rows.

    A piece that also has other rows, which another rank maps, is read from its file.

    Raises:
        Damaged: A piece does not match its checksum.
    """

    def check(piece: dict[str, Any]) -> None:
        first = piece["offset"][0] - rows.start
        stop = first + piece["size"][0]
        if first < 0 or stop > len(rows):
            read_piece(folder, name, dtype_of(index[name]), piece)
        elif zlib.crc32(bytes_of(mapped[first:stop])) != piece["crc32"]:
            raise Damaged(f"{piece['file']} is damaged: the checksum of {name} does not match")

    in_threads(check, pieces_with(index, name, rows))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mmap(address: int | None, size: int, access: int, flags: int, handle: int, offset: int) -> int:
    """Call mmap of the C library: Python's takes no address."""
    call = _libc().mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    ]  # fmt: skip
    place = call(address, size, access, flags, handle, offset)
    if place in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"rows cannot be mapped: {os.strerror(number)}")
    return int(place)
