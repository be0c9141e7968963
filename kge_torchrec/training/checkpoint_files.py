"""The files of a checkpoint: named rows in one safetensors file per rank, and a manifest.

    rank-00000.safetensors  the rows of a rank, in pieces of at most 64 MiB ("tensor@first row")
    manifest.json           written last: the progress, the size of each file, and for each tensor
                            [file, first row, rows, crc32] of its pieces

Any number of ranks reads rows by the name of their tensor and their numbers.  The checksum of a
piece is verified before its values are used.  Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kge_torchrec import files
from kge_torchrec.distributed.processes import Rows
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.training.state import TrainState

MANIFEST, FORMAT = "manifest.json", 2
THREADS = 4  # pieces in memory at the same time; disks are faster with several requests
PIECE_BYTES = 64 << 20
_BLOCK = 1 << 20  # bytes that stay in the cache of a core while they are checked and written
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
           torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
           torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
Pieces = dict[str, list[list[Any]]]  # [file, first row, rows, crc32] of each piece, by tensor


class Damaged(KGEError, RuntimeError):
    """A checkpoint is damaged or incomplete; the message says what and where."""


class NotFinite(KGEError, ValueError):
    """A tensor has NaN or infinity; the argument is its name."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of a tensor as bytes; of a contiguous one on the CPU, its own memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def is_finite(values: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    return _are_finite(bytes_of(values), values.dtype)


def write_rows(path: Path, state: Iterable[Rows], threads: int = 1) -> Pieces:
    """Write rows into a new file by some threads; return its pieces.  Raises NotFinite, OSError."""
    pieces: list[tuple[str, int, int, Tensor]] = []
    header, end = dict[str, Any](), 0
    written: Pieces = {}
    for name, local, first, _ in sorted(state, key=lambda rows: -rows.local.itemsize):  # aligned
        rows = torch.atleast_1d(local.detach())
        written.setdefault(name, [])
        size = max(1, PIECE_BYTES // max(1, rows[:1].nbytes))  # rows of a piece
        for piece in rows.split(size) if len(rows) else ():
            place = {"data_offsets": [end, end + piece.nbytes]}
            about = {"dtype": _DTYPES[piece.dtype], "shape": [*piece.shape]}
            header[f"{name}@{first}"] = about | place
            pieces.append((name, first, end, piece))
            first, end = first + len(piece), end + piece.nbytes
    text = json.dumps(header).encode()
    data = -(-(8 + len(text)) // 4096) * 4096  # rows begin with a page of memory
    with path.open("wb") as file:
        file.write((data - 8).to_bytes(8, "little") + text.ljust(data - 8))
        file.flush()

        def write(piece: tuple[str, int, int, Tensor]) -> int:
            name, _, start, values = piece
            return _write(file.fileno(), data + start, name, values)

        checksums = _in_threads(write, pieces, threads)
        os.fsync(file.fileno())
    for (name, first, _, values), checksum in zip(pieces, checksums, strict=True):
        written[name].append([path.name, first, len(values), checksum])
    return written


def _write(handle: int, start: int, name: str, values: Tensor) -> int:
    """Write the values of a piece at a place of a file; return their checksum."""
    numbers, checksum = bytes_of(values), 0
    for first in range(0, len(numbers), _BLOCK):
        some = numbers[first : first + _BLOCK]
        if not _are_finite(some, values.dtype):
            raise NotFinite(name)
        checksum = zlib.crc32(some, checksum)
        while some:
            count = os.pwrite(handle, some, start)
            some, start = some[count:], start + count
    return checksum


def _are_finite(numbers: memoryview, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or not numbers:
        return True
    values = torch.frombuffer(numbers, dtype=dtype)
    if dtype == torch.bfloat16:  # which NumPy lacks
        values = values.float()
    return bool(np.isfinite(values.numpy()).all())  # several times as fast as torch's


def _in_threads(work: Callable[[Any], Any], items: Sequence[Any], threads: int) -> list[Any]:
    """Apply ``map`` in threads.  Reading, writing and checksums release the GIL."""
    if threads == 1:
        return list(map(work, items))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def write_manifest(folder: Path, progress: TrainState, tensors: Pieces) -> None:
    """Write the manifest, which completes a checkpoint whose files are on disk."""
    names = sorted({piece[0] for pieces in tensors.values() for piece in pieces})
    sizes = {name: (folder / name).stat().st_size for name in names}
    about = {"format": FORMAT, "progress": progress.to_dict(), "files": sizes, "tensors": tensors}
    (folder / MANIFEST).write_text(json.dumps(about | {"crc32": _checksum(about)}), "utf-8")
    files.sync(folder / MANIFEST)
    files.sync(folder)


def _checksum(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, to read from.  No method is collective."""

    folder: Path
    progress: TrainState
    files: dict[str, int]  # name: bytes
    tensors: Pieces

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the manifest, and check the sizes of the files.  Raises Damaged, OSError."""
        try:
            manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
            version, expected = manifest["format"], manifest.pop("crc32", None)
            if version != FORMAT:
                raise Damaged(f"the checkpoint has format {version}; the only known is {FORMAT}")
            if expected != _checksum(manifest):
                raise Damaged(f"{MANIFEST} is damaged: its checksum does not match")
            made = cls(
                folder, TrainState(**manifest["progress"]), manifest["files"], manifest["tensors"]
            )
            made._check()
            return made
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{MANIFEST} is not valid ({first_line(error)})") from error

    def _check(self) -> None:
        for name, size in self.files.items():
            if Path(name).name != name:
                raise ValueError(f"{name} is outside the checkpoint")
            actual = (self.folder / name).stat().st_size if (self.folder / name).is_file() else None
            if actual != size:
                has = (
                    "is missing" if actual is None else f"has {actual:,} bytes instead of {size:,}"
                )
                raise Damaged(f"{name} {has}")
        for pieces in self.tensors.values():
            for file, first, rows, checksum in pieces:
                if file not in self.files or min(first + 0, rows - 1, checksum + 0) < 0:
                    raise ValueError(f"{[file, first, rows, checksum]} is no piece")

    def rows(self, name: str, wanted: np.ndarray) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces that hold one of some rows of a tensor: first row, and rows (n, ...).

        ``wanted`` are the numbers of the rows, ascending.
        """
        for piece in self._pieces(name):
            low, high = np.searchsorted(wanted, [piece[1], piece[1] + piece[2]])
            if low < high:
                yield piece[1], self.read(name, piece)

    def fill(self, state: Iterable[Rows]) -> None:
        """Fill the rows of a state from the checkpoint; raise Damaged if it lacks some."""
        work = []
        for rows in state:
            target = torch.atleast_1d(rows.local.detach())
            wanted = range(rows.first, rows.first + len(target))
            work += [(rows, target, piece) for piece in self.pieces_with(rows.name, wanted)]

        def read(item: tuple[Rows, Tensor, list[Any]]) -> None:
            rows, target, piece = item
            values, start = self.read(rows.name, piece), piece[1] - rows.first
            if values.shape[1:] != target.shape[1:]:
                has, expected = [*values.shape[1:]], [*target.shape[1:]]
                raise Damaged(f"{rows.name} has rows of the size {has} instead of {expected}")
            low, high = max(start, 0), min(start + len(values), len(target))
            target[low:high].copy_(values[low - start : high - start])

        _in_threads(read, work, THREADS)

    def _pieces(self, name: str) -> list[list[Any]]:
        if name not in self.tensors:
            raise Damaged(f"the checkpoint has no {name}")
        return sorted(self.tensors[name], key=lambda piece: piece[1])

    def pieces_with(self, name: str, wanted: range) -> list[list[Any]]:
        """Return the pieces with some rows of a tensor, in order; raise Damaged without them."""
        if not len(wanted):
            return []
        some = [p for p in self._pieces(name) if p[1] < wanted.stop and p[1] + p[2] > wanted.start]
        end = wanted.start
        for _, first, count, _ in some:
            if first > end:
                break
            end = first + count
        if end < wanted.stop:
            raise Damaged(f"the checkpoint lacks rows of {name} from {end:,} to {wanted.stop:,}")
        return some

    def read(self, name: str, piece: list[Any]) -> Tensor:
        """Read a piece, a view of its file; raise Damaged if it does not match its checksum."""
        file, first, count, checksum = piece
        try:
            with safe_open(self.folder / file, "pt") as opened:
                rows: Tensor = opened.get_tensor(f"{name}@{first}")
        except SafetensorError as error:
            raise Damaged(f"{file} is damaged: {first_line(error)}") from error
        if len(rows) != count or zlib.crc32(bytes_of(rows)) != checksum:
            raise Damaged(f"{file} is damaged: the checksum of {name} at {first:,} does not match")
        return rows
