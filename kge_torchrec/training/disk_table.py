"""A table on disk: one file per tensor and rank, of which the engine's table holds some parts.

The engine has a table of C parts, with its optimizer as ever.  Before a step that needs another
part, the rows of one part are written to the files, and the same rows are filled with another part.
One thread reads and writes in order: it reads the next part, and writes the last one, while the
engine trains.  A checkpoint copies the files like other rows.

The files get their disk space when they are made, so a full disk is an error before training.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data.parts import PartLayout
from kge_torchrec.distributed.processes import Processes, Rows, on_all_ranks, on_first_rank
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT, EmbeddingBackend, EntityShard
from kge_torchrec.embeddings.init import EntityInit, fill_rows
from kge_torchrec.errors import KGEError
from kge_torchrec.files import free_space, in_words
from kge_torchrec.training.checkpoint_files import Checkpoint

_TABLE = f"model.{ENTITY_WEIGHT}"  # names in a checkpoint
_STATES = f"optimizer.{ENTITY_WEIGHT}."
Part = dict[str, Tensor]  # rows of each tensor, by name


class DiskError(KGEError, RuntimeError):
    """The table cannot be kept on disk; the message says where and why."""


class DiskTable:
    """The rows of this rank in files, and those of C parts in the table of an engine."""

    def __init__(
        self,
        backend: EmbeddingBackend,
        layout: PartLayout,
        folder: Path,
        seed: int,
        init: EntityInit,
        processes: Processes,
    ):
        self.backend, self.layout, self.processes, self.folder = backend, layout, processes, folder
        self._ids = layout.block_of(processes.rank)
        self._memory = {
            own.name: own.local
            for own in backend.state()
            if own.name == _TABLE or own.name.startswith(_STATES)
        }
        on_first_rank(processes, lambda: shutil.rmtree(folder, ignore_errors=True))
        self._files: Part = on_all_ranks(processes, self._make)
        self.rows = [Rows(name, tensor, self._ids.start) for name, tensor in self._files.items()]
        fill_rows(self.shard(), seed, init)
        self._parts: tuple[int | None, ...] = (None,) * layout.places
        self._changed = False  # whether steps were taken since the parts were written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="table-on-disk")
        self._incoming, self._outgoing = self._staging(), self._staging()
        self._reading: tuple[int, Future[None]] | None = None
        self._written: Future[None] = self._thread.submit(lambda: None)

    def _make(self) -> Part:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return {name: self._mapped(name, tensor) for name, tensor in self._memory.items()}
        except OSError as error:
            raise DiskError(
                f"the table cannot be kept in {self.folder}: {in_words(error)} "
                f"({free_space(self.folder)} free on that disk)"
            ) from error

    def _mapped(self, name: str, like: Tensor) -> Tensor:
        """Make a file with the initial values of a tensor's state, and map it."""
        shape = len(self._ids), *like.shape[1:]
        if not len(self._ids):
            return torch.empty(shape, dtype=like.dtype)
        numbers = torch.empty(0, dtype=like.dtype).numpy().dtype
        path = self.folder / f"rank-{self.processes.rank:05d}-{name}.bin"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, int(np.prod(shape)) * numbers.itemsize)
        rows = torch.from_numpy(np.memmap(path, numbers, "r+", shape=shape))
        if name != _TABLE and like[:1].any():  # the files are zeros
            rows.copy_(like[:1].expand_as(rows))
        return rows

    def _staging(self) -> Part:
        pin = any(tensor.is_cuda for tensor in self._memory.values())
        return {
            name: torch.empty(
                self.layout.part_rows, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=pin
            )
            for name, tensor in self._memory.items()
        }

    def _in_files(self, part: int) -> Part:
        """Return the rows of a part in the files, fewer at the end of the table."""
        ids, first = self.layout.ids_of(self.processes.rank, part), self._ids.start
        return {name: t[ids.start - first : ids.stop - first] for name, t in self._files.items()}

    def _in_memory(self, place: int) -> Part:
        first = place * self.layout.part_rows
        stop = first + self.layout.part_rows
        return {name: tensor[first:stop] for name, tensor in self._memory.items()}

    def show(self, parts: tuple[int, ...], following: tuple[int, ...] | None) -> None:
        """Have these parts in memory for a step; read ahead what the next stage needs."""
        for place, part in enumerate(parts):
            if self._parts[place] != part:
                self._bring(place, part)
        ahead = [part for part in following or () if part not in parts]
        if ahead:
            self._read(ahead[0])
        self._changed = True

    @torch.no_grad()
    def _bring(self, place: int, part: int) -> None:
        """Exchange the part in a place for another one."""
        rows, before = self._in_memory(place), self._parts[place]
        if self._reading is None or self._reading[0] != part:
            self._read(part)
        assert self._reading is not None
        self._reading[1].result()
        if before is not None and self._changed:
            self._written.result()
            _copy(rows, self._outgoing)
            self._written = self._thread.submit(_copy, self._outgoing, self._in_files(before))
        _copy(self._incoming, rows)
        self._reading = None
        self._parts = (*self._parts[:place], part, *self._parts[place + 1 :])

    def _read(self, part: int) -> None:
        """Read a part in the thread, after what it writes."""
        if self._reading is None or self._reading[0] != part:
            self._reading = part, self._thread.submit(_copy, self._in_files(part), self._incoming)

    @torch.no_grad()
    def write_all(self) -> None:
        """Write the parts in memory to the files."""
        self._written.result()
        for place, part in enumerate(self._parts):
            if part is not None and self._changed:
                _copy(self._in_memory(place), self._in_files(part))
        self._changed = False

    def forget(self) -> None:
        """Forget the parts in memory, because the files are about to change."""
        self._written.result()
        self._parts, self._reading, self._changed = (None,) * self.layout.places, None, False

    def shard(self) -> EntityShard:
        """Return this rank's rows of the whole table, which lie in a file."""
        device = self.backend.shard().device
        return EntityShard(
            self._files[_TABLE], self._ids.start, self.layout.num_entities, scored_on=device
        )

    def close(self) -> None:
        """Remove the files."""
        self._thread.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


def _copy(some: Part, others: Part) -> None:
    """Copy rows; the last part of a table has fewer."""
    for name, rows in some.items():
        count = min(len(rows), len(others[name]))
        others[name][:count].copy_(rows[:count])


def mapped_or_read(checkpoint: Checkpoint, name: str, wanted: range, dim: int) -> Tensor:
    """Return float32 rows of a tensor of a checkpoint, (len(wanted), dim), that lie on disk.

    They are mapped where one file has them all, one after another, and else copied to a file that
    has no name.  Tables of several types are copied: their rows are in turns in the order of ids.
    Writing to them changes no file of the checkpoint.
    """
    if not len(wanted):
        return torch.empty(0, dim)
    own = checkpoint.pieces_with(name, wanted)
    path = checkpoint.folder / own[0][0]
    with path.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    places = [(header.get(f"{name}@{first}"), first) for _, first, _, _ in own]  # None: elsewhere
    starts = {place and place["data_offsets"][0] - 4 * dim * first for place, first in places}
    if len(starts) == 1:  # all pieces agree where row 0 would be
        for piece in own:
            checkpoint.read(name, piece)  # to verify it
        start = 8 + size + 4 * dim * wanted.start + starts.pop()
        return torch.from_numpy(np.memmap(path, np.float32, "c", start, (len(wanted), dim)))
    beside = checkpoint.folder.parent  # or the system's folder for such files
    with tempfile.TemporaryFile(dir=beside if os.access(beside, os.W_OK) else None) as copy:
        os.posix_fallocate(copy.fileno(), 0, 4 * dim * len(wanted))
        rows = torch.from_numpy(np.memmap(copy, np.float32, "r+", shape=(len(wanted), dim)))
    checkpoint.fill([Rows(name, rows, wanted.start)])
    return rows
