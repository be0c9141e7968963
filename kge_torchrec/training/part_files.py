"""Files of the parts of a table: one per part and rank, with rows and the optimizer's state.

A file is written once, under a new name, and never changed.  A checkpoint therefore takes the files
as hard links, without a copy.  Every piece of a file has a checksum, which is verified when it is
read.  Reading and writing leave no pages behind in the memory that the kernel keeps for files.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kge_torchrec.data.parts import PAGE, PartLayout
from kge_torchrec.embeddings.chunks import row_chunks
from kge_torchrec.errors import KGEError
from kge_torchrec.files import free_space, in_words, link_or_copy
from kge_torchrec.training.checkpoint_index import (
    Damaged,
    Index,
    NonFiniteParameters,
    bytes_of,
    is_finite,
    not_finite,
    pieces_with,
    read_into,
    read_rows,
)

Rows = dict[str, Tensor]  # the tensors of a part by their names in a checkpoint, (n, ...)


class PartError(KGEError, RuntimeError):
    """A part of the table cannot be read or written; the message says which and why."""


class PartFile(NamedTuple):
    """One version of a part: its file, and the pieces of each tensor as in a checkpoint's index."""

    path: Path
    pieces: dict[str, list[dict[str, Any]]]


class PartFiles:
    """The newest files of the parts of this rank.

    Args:
        folder: Where they lie; made if it is missing.
        layout: How the table is cut into parts.
        rank: This rank.
        initial: Fills the tensors of a part that has no file yet.

    Raises:
        PartError: The folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        layout: PartLayout,
        rank: int,
        initial: Callable[[range, Rows], object],
    ):
        self.folder, self.layout, self.rank, self._initial = folder, layout, rank, initial
        self._prefix, self._written = f"rank-{rank:05d}", 0
        self.files: dict[int, PartFile] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.remove()
        except OSError as error:
            raise PartError(f"parts cannot be kept in {folder}: {in_words(error)}") from error

    def remove(self) -> None:
        """Remove the files of this rank, also those of a killed run."""
        self.files.clear()
        for leftover in self.folder.glob(f"{self._prefix}-*"):
            leftover.unlink()

    def ids_of(self, part: int) -> range:
        """Return the ids of a part on this rank."""
        return self.layout.ids_of(self.rank, part)

    def read(self, part: int, into: Rows) -> None:
        """Fill the tensors of a part (n, ...), from its file or with initial values.

        Raises:
            PartError: The file is damaged or cannot be read.
        """
        if part not in self.files:
            self._initial(self.ids_of(part), into)
            return
        file = self.files[part]
        try:
            with file.path.open("rb") as handle:
                for name, pieces in file.pieces.items():
                    for piece in pieces:
                        first = piece["offset"][0] - self.ids_of(part).start
                        rows = into[name][first : first + piece["size"][0]]
                        read_into(rows, handle, name, piece)
                forget_pages(handle.fileno())
        except Damaged as error:
            raise PartError(f"{self.folder}: {error}. Resume from the last checkpoint") from error
        except OSError as error:
            raise PartError(f"part {part} cannot be read: {in_words(error)}") from error

    def write(self, part: int, rows: Rows) -> None:
        """Write a new version of a part, and remove the version before.

        Raises:
            PartError: The file cannot be written.
            NonFiniteParameters: A value is NaN or infinite.
        """
        self._written += 1
        path = self.folder / f"{self._prefix}-part-{part:05d}-{self._written}.bin"
        try:
            with path.open("wb") as handle:
                pieces = self._write(handle, part, rows)
                os.fdatasync(handle.fileno())
                forget_pages(handle.fileno())
        except OSError as error:
            path.unlink(missing_ok=True)
            raise PartError(
                f"part {part} of the table cannot be written: {in_words(error)} "
                f"({free_space(self.folder)} free on that disk); earlier checkpoints are intact"
            ) from error
        except NonFiniteParameters:
            path.unlink(missing_ok=True)
            raise
        self._replace(part, PartFile(path, pieces))

    def _write(self, handle: Any, part: int, rows: Rows) -> dict[str, list[dict[str, Any]]]:
        ids, end = self.ids_of(part), 0
        pieces: dict[str, list[dict[str, Any]]] = {}
        for name, tensor in rows.items():
            end = -(-end // PAGE) * PAGE
            pieces[name], first = [], ids.start
            for values in row_chunks(tensor):
                if not is_finite(values):
                    raise not_finite(name, self.rank)
                numbers = bytes_of(values)
                handle.seek(end)
                handle.write(numbers)
                offset = [first, *(0 for _ in values.shape[1:])]
                pieces[name].append(
                    {
                        "offset": offset,
                        "size": list(values.shape),
                        "file": "",
                        "start": end,
                        "crc32": zlib.crc32(numbers),
                    }
                )
                end, first = end + len(numbers), first + len(values)
        return pieces

    def _replace(self, part: int, file: PartFile) -> None:
        before = self.files.get(part)
        self.files[part] = file
        if before is not None:
            before.path.unlink(missing_ok=True)

    def link(self, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Link the files of all parts into a checkpoint; return the pieces of each tensor.

        A disk without hard links gets copies.

        Raises:
            OSError: A file can neither be linked nor copied.
        """
        results: dict[str, list[dict[str, Any]]] = {}
        for part, file in sorted(self.files.items()):
            name = f"{self._prefix}-part-{part:05d}.bin"
            link_or_copy(file.path, folder / name)
            for tensor, pieces in file.pieces.items():
                own = results.setdefault(tensor, [])
                own += [{**piece, "file": name} for piece in pieces]
        return results

    def load(self, folder: Path, index: Index, like: Callable[[int], Rows]) -> None:
        """Take all parts from a checkpoint, of any number of ranks, with or without parts.

        Args:
            folder: The checkpoint.
            index: Its index.
            like: Returns empty tensors for a part of this rank.

        Raises:
            Damaged: A piece is missing or does not match its checksum.
            PartError: A part cannot be written.
        """
        for part in range(self.layout.parts):
            ids, rows = self.ids_of(part), like(part)
            if not len(ids):
                continue
            pieces = {name: pieces_with(index, name, ids) for name in rows}
            for name, tensor in rows.items():
                read_rows(folder, index, name, ids, tensor)
            own = {piece["file"] for of_tensor in pieces.values() for piece in of_tensor}
            whole = all(
                sum(piece["size"][0] for piece in of_tensor) == len(ids)
                for of_tensor in pieces.values()
            )
            if len(own) == 1 and whole:  # a file of this very part
                self._written += 1
                path = self.folder / f"{self._prefix}-part-{part:05d}-{self._written}.bin"
                link_or_copy(folder / own.pop(), path)
                self._replace(part, PartFile(path, pieces))
            else:
                self.write(part, rows)


def forget_pages(handle: int) -> None:
    """Let the kernel drop the pages of a file, so that they do not push out those of training."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def empty_like(tensors: Rows, rows: int) -> Rows:
    """Return tensors on the CPU for some rows, of the same kinds; pinned where there is CUDA."""
    pinned = torch.cuda.is_available() and any(t.device.type == "cuda" for t in tensors.values())
    return {
        name: torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned)
        for name, tensor in tensors.items()
    }
