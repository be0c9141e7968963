"""The buffer of a table on disk: the rows of the engine's table hold some parts at a time.

The engine has a table of C parts, with its optimizer as ever.  Before a step that needs another
part, the buffer writes one part of that table to its file and fills the same rows, and their
optimizer state, with another part.  The next part is read ahead, and the last one is written, while
the engine trains.
"""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kge_torchrec.data.parts import PartLayout
from kge_torchrec.distributed.processes import Processes, on_all_ranks, on_first_rank
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT, EmbeddingBackend, EntityShard
from kge_torchrec.embeddings.init import EntityInit, fill_rows
from kge_torchrec.training.checkpoint_index import Index
from kge_torchrec.training.mapped_rows import Run, map_rows
from kge_torchrec.training.part_files import PartFiles, Rows, empty_like

WEIGHT = f"engine.model.{ENTITY_WEIGHT}"  # names in a checkpoint
_STATES = f"engine.optimizer.state.{ENTITY_WEIGHT}."


class PartBuffer:
    """The parts of this rank in memory, and all others in files.

    Args:
        backend: An engine whose table has the rows of the buffer.
        layout: How the table is cut into parts.
        folder: The folder of the files.
        seed: Seed of the initial values.
        init: The distribution of the initial values.
        processes: The ranks.

    Raises:
        PartError: The folder cannot be made.
    """

    def __init__(
        self,
        backend: EmbeddingBackend,
        layout: PartLayout,
        folder: Path,
        seed: int,
        init: EntityInit,
        processes: Processes,
    ):
        self.backend, self.layout, self.processes = backend, layout, processes
        self._seed, self._init = seed, init
        self._tensors = _tensors_of(backend)
        self._fresh = {name: tensor[:1].clone() for name, tensor in self._tensors.items()}
        on_first_rank(processes, lambda: shutil.rmtree(folder, ignore_errors=True))
        self.files = on_all_ranks(
            processes, lambda: PartFiles(folder, layout, processes.rank, self._fill)
        )
        self._parts: tuple[int | None, ...] = (None,) * layout.places
        self._changed = False  # whether steps were taken since the parts were written
        self._reader, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._incoming, self._outgoing = self._staging(), self._staging()
        self._reading: tuple[int, Future[None]] | None = None
        self._writing: tuple[int, Future[None]] | None = None

    def _staging(self) -> Rows:
        return empty_like(self._tensors, self.layout.part_rows)

    def _fill(self, ids: range, into: Rows) -> None:
        """Give a part its initial values."""
        for name, tensor in into.items():
            if name == WEIGHT:
                shard = EntityShard(tensor[: len(ids)], ids.start, self.layout.num_entities)
                fill_rows(shard, self._seed, self._init)
            else:
                tensor.copy_(self._fresh[name].expand_as(tensor))

    def show(self, parts: tuple[int, ...], following: tuple[int, ...] | None) -> None:
        """Have these parts in memory for a step; read ahead what the next stage needs.

        Collective.

        Args:
            parts: The part in each place.
            following: The same for the next stage; None if there is none in this epoch.

        Raises:
            PartError: A part cannot be read or written, here or on another rank.
        """
        if parts != self._parts:
            on_all_ranks(self.processes, lambda: self._exchange(parts, following))
        self._changed = True

    def _exchange(self, parts: tuple[int, ...], following: tuple[int, ...] | None) -> None:
        for place, part in enumerate(parts):
            if self._parts[place] != part:
                self._bring(place, part)
        needed = [p for p in following or () if p not in parts]
        if needed:
            self._reading = needed[0], self._reader.submit(self._read, needed[0])

    @torch.no_grad()
    def _bring(self, place: int, part: int) -> None:
        """Bring a part into a place; write the part that was there in the background."""
        if self._reading is None or self._reading[0] != part:
            self._wait_for_reading()
            self._reading = part, self._reader.submit(self._read, part)
        self._wait_for_reading()
        rows, before = self._rows_at(place), self._parts[place]
        if before is not None and self._changed:
            self._wait_for_writing()
            for name, tensor in rows.items():
                self._outgoing[name].copy_(tensor)
            self._writing = before, self._writer.submit(self._write, before, self._outgoing)
        for name, tensor in rows.items():
            tensor.copy_(self._incoming[name])
        self._parts = (*self._parts[:place], part, *self._parts[place + 1 :])

    def _rows_at(self, place: int) -> Rows:
        first = place * self.layout.part_rows
        stop = first + self.layout.part_rows
        return {name: tensor[first:stop] for name, tensor in self._tensors.items()}

    def _own(self, part: int, rows: Rows) -> Rows:
        """Return the rows of a part that this rank has, fewer at the end of the table."""
        count = len(self.files.ids_of(part))
        return {name: tensor[:count] for name, tensor in rows.items()}

    def _read(self, part: int) -> None:
        writing = self._writing
        if writing is not None and writing[0] == part:
            writing[1].result()
        if len(self.files.ids_of(part)):
            self.files.read(part, self._own(part, self._incoming))

    def _write(self, part: int, rows: Rows) -> None:
        if len(self.files.ids_of(part)):
            self.files.write(part, self._own(part, rows))

    def _wait_for_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading[1].result()

    def _wait_for_writing(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing[1].result()

    def write_all(self) -> None:
        """Write what changed, so that every part has a file.  Collective.

        Raises:
            PartError: A part cannot be written, here or on another rank.
        """
        on_all_ranks(self.processes, self._write_all)

    def _write_all(self) -> None:
        self._wait_for_writing()
        if self._changed:
            for place, part in enumerate(self._parts):
                if part is not None:
                    self._write(part, {n: t.cpu() for n, t in self._rows_at(place).items()})
        self._changed = False
        for part in range(self.layout.parts):
            if part not in self.files.files and len(self.files.ids_of(part)):
                rows = self._own(part, self._outgoing)  # no stage has come to it yet
                self._fill(self.files.ids_of(part), rows)
                self.files.write(part, rows)

    def shard(self) -> EntityShard:
        """Return this rank's rows of the whole table, mapped from its files.  Collective."""
        self.write_all()
        ids, runs = self.layout.block_of(self.processes.rank), list[Run]()
        for part in range(self.layout.parts):
            own = self.files.ids_of(part)
            if len(own):
                file = self.files.files[part]
                start = file.pieces[WEIGHT][0]["start"]
                runs.append(Run(file.path, start, own.start, len(own)))
        table = self.backend.shard()
        rows = on_all_ranks(self.processes, lambda: map_rows(runs, ids, table.dim))
        return EntityShard(rows, ids.start, self.layout.num_entities, scored_on=table.device)

    def link(self, folder: Path) -> dict[str, Any] | None:
        """Link all parts into a checkpoint; return their entries of its index on rank 0.

        Collective.
        """
        self.write_all()
        pieces = on_all_ranks(self.processes, lambda: self.files.link(folder))
        every = self.processes.gather(pieces)
        if not self.processes.is_first:
            return None
        return {name: self._entry(name, tensor, every) for name, tensor in self._tensors.items()}

    def _entry(self, name: str, tensor: Tensor, every: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "size": [self.layout.num_entities, *tensor.shape[1:]],
            "pieces": [piece for own in every for piece in own.get(name, [])],
        }

    def close(self) -> None:
        """Remove the files of parts; checkpoints have their own links to them.

        A file that cannot be removed stays: an error of training must not be hidden.
        """
        for pool in (self._reader, self._writer):
            pool.shutdown()
        with contextlib.suppress(OSError):  # other ranks may have files in the folder
            self.files.remove()
            self.files.folder.rmdir()

    def load(self, folder: Path, index: Index) -> None:
        """Take all parts from a checkpoint; the next step reads those that it needs.  Collective.

        Raises:
            Damaged: The checkpoint is damaged.
            PartError: A part could not be read or written before.
            OtherRankFailed: One of them happened on another rank.
        """
        on_all_ranks(self.processes, lambda: self._load(folder, index))

    def _load(self, folder: Path, index: Index) -> None:
        self._wait_for_reading()
        self._wait_for_writing()
        self._parts, self._changed = (None,) * self.layout.places, False
        self.files.load(folder, index, lambda part: self._own(part, self._incoming))


def _tensors_of(backend: EmbeddingBackend) -> Rows:
    """Return this rank's tensors of the table and of its optimizer, by names in a checkpoint."""
    state = backend.state()
    tables = {WEIGHT: state["model"][ENTITY_WEIGHT]}
    states = state["optimizer"]["state"].get(ENTITY_WEIGHT, {})
    tables.update({f"{_STATES}{name}": value for name, value in states.items()})
    return {name: _local(value) for name, value in tables.items()}


def _local(tensor: DTensor) -> Tensor:
    local: Any = tensor.to_local()
    (only,) = local.local_shards() if hasattr(local, "local_shards") else [local]
    return only.detach()


def without_table(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an engine without its table, which the files of parts hold."""
    model = {k: v for k, v in state["model"].items() if k != ENTITY_WEIGHT}
    states = {k: v for k, v in state["optimizer"]["state"].items() if k != ENTITY_WEIGHT}
    return {**state, "model": model, "optimizer": {**state["optimizer"], "state": states}}
