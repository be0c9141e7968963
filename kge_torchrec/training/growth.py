"""Extended and shrunk runs: the checkpoint with rows for new entities, or without some of them.

Ids of new entities follow the old ones, so new rows are appended to every tensor by entity.  Old
values stay in their files on disk, and new rows go into a file of their own.  In tensors by
relation, the inverses follow the relations, so new rows are inserted in between and the tensor is
written anew.  The optimizer state of new rows is zero.

The rows of features lie behind those of all entities.  Their pieces move behind the new entities,
and the rows of new features follow.

Shapes: r rows of entities and features, R relations (without inverses), D elements per row.
"""

from __future__ import annotations

import copy
import itertools
import logging
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec import files
from kge_torchrec.config import GraphSize
from kge_torchrec.data import ENTITY, FEATURES
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT
from kge_torchrec.embeddings.tables import EntityTable
from kge_torchrec.errors import StoreError
from kge_torchrec.training.checkpoint_index import (
    Index,
    bytes_of,
    dtype_of,
    finish,
    in_threads,
    is_finite,
    make_empty,
    open_checkpoint,
    pieces_of,
    pieces_with,
    read_piece,
    read_whole,
)
from kge_torchrec.training.checkpoints import RAW, CheckpointError, name_of
from kge_torchrec.training.state import TrainState

log = logging.getLogger(__name__)

_FILE = "grown{}.bin"  # "" for a run's first extension, then "-2", "-3" and so on
Sizes = tuple[GraphSize, GraphSize]
_MODEL, _STATE, _RAW = "engine.model.", "engine.optimizer.state.", f"engine.{RAW}."


class GrownCheckpoint:
    """The first checkpoint of an extended run, written by one rank with memory for a few rows.

    Call ``add_rows`` until all new rows of the table are added, those of entities before those of
    features, then ``finish``.

    Args:
        source: A checkpoint of the old run.
        folder: The folder ``checkpoints`` of the new run.
        sizes: Sizes of the graph before and after.
        tables: The entity tables of the new run.
        data: Fingerprint of the old store.

    Raises:
        CheckpointError: The checkpoint cannot be extended.
        StoreError: The checkpoint was trained on other triples.
        Damaged, OSError: The checkpoint cannot be read.
    """

    def __init__(
        self, source: Path, folder: Path, sizes: Sizes, tables: Sequence[EntityTable], data: str
    ):
        self.source, (self.old, self.new), self._tables = source, sizes, tables
        index, self._before = open_checkpoint(source)
        if self._before.data != data:
            raise StoreError(f"{source} was trained on different triples than those of the store")
        # An extended run starts from the average of the weights, if there is one.
        index = {name: entry for name, entry in index.items() if not name.startswith(_RAW)}
        self._index: Index = index
        self._before_growth: Index = copy.deepcopy(index)
        self._target = folder / name_of(TrainState())
        self._partial = folder / f".partial-{self._target.name}"
        make_empty(self._partial)
        for file in sorted(source.glob("*.bin")):
            files.link_or_copy(file, self._partial / file.name)
        # Linked files belong to the source run as well, so new rows get a file of their own.
        self._file = _free_name(self._partial)
        self._end, self._rows = 0, self.old.entities
        self._add_types()
        self._features = self._without_features()

    def _add_types(self) -> None:
        """Add the optimizer states, still without rows, of types that the old run did not have."""
        table = self._index[_MODEL + ENTITY_WEIGHT]
        for own in self._tables:
            for state, by_row in own.optimizer.kind.saved_states():
                name = f"{_STATE}{ENTITY_WEIGHT}.{own.type}.{state}"
                size = [0] if by_row else [0, table["size"][1]]
                self._index.setdefault(name, {**table, "size": size, "pieces": []})

    def _without_features(self) -> dict[str, list[dict[str, Any]]]:
        """Cut the rows of old features off all tensors; return their pieces, numbered from 0."""
        kind = FEATURES if FEATURES in {table.type for table in self._tables} else ENTITY
        cut: dict[str, list[dict[str, Any]]] = {}
        for name, entry in self._index.items() if self.old.features else ():
            if name == _MODEL + ENTITY_WEIGHT or _type_of(name) == kind:
                entry["size"][0] -= self.old.features
                pieces, entry["pieces"], cut[name] = pieces_of(entry), [], []
                for piece in pieces:
                    for part in self._split(name, entry, piece):
                        start, *others = part["offset"]
                        place = start - entry["size"][0]
                        if place < 0:
                            entry["pieces"].append(part)
                        else:
                            cut[name].append({**part, "offset": [place, *others]})
        return cut

    def _split(
        self, name: str, entry: dict[str, Any], piece: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Return a piece, or two of them if it has rows on both sides of the tensor's end."""
        start, *others = piece["offset"]
        count, end = entry["size"][0] - start, entry["size"][0]
        if not 0 < count < piece["size"][0]:
            return [piece]
        rows = read_piece(self.source, name, dtype_of(entry), piece)
        return [
            self._piece(rows[:count], piece["offset"]),
            self._piece(rows[count:], [end, *others]),
        ]

    def _put_features_back(self) -> None:
        """Append the rows of old features."""
        for name, pieces in self._features.items():
            entry = self._index[name]
            for piece in pieces:
                start, *others = piece["offset"]
                entry["pieces"].append({**piece, "offset": [entry["size"][0] + start, *others]})
            entry["size"][0] += self.old.features
        self._rows += self.old.features

    def add_rows(self, rows: Tensor) -> None:
        """Append the next rows of new entities or features, (m, D) on the CPU."""
        if self._rows == self.new.entities:
            self._put_features_back()
        stop = self._rows + len(rows)
        counts: Counter[str] = Counter()
        for table in self._tables:
            counts[table.type] += len(table.within(self._rows, stop))
        for name, entry in self._index.items():
            if name == _MODEL + ENTITY_WEIGHT:
                self._append(entry, rows)
            elif (kind := _type_of(name)) is not None and counts[kind]:
                shape = counts[kind], *entry["size"][1:]
                self._append(entry, torch.zeros(shape, dtype=dtype_of(entry)))
        self._rows = stop

    def _append(self, entry: dict[str, Any], numbers: Tensor) -> None:
        offset = [rows if place == 0 else 0 for place, rows in enumerate(entry["size"])]
        entry["pieces"].append(self._piece(numbers, offset))
        entry["size"][0] += len(numbers)

    def finish(self, start: dict[str, Tensor], data: str) -> None:
        """Complete the checkpoint and give it its name.

        Args:
            start: Initial values of the objective's parameters for the new graph, by name.  New
                relations get their rows from here.
            data: Fingerprint of the extended store.
        """
        if self._rows == self.new.entities:
            self._put_features_back()
        if self._rows != self.new.rows:
            raise ValueError(f"{self._rows} rows instead of {self.new.rows}")
        grown = {
            name: values
            for name, values in start.items()
            if self._before_growth[f"{_MODEL}objective.{name}"]["size"] != [*values.shape]
        }
        for name, entry in self._index.items():
            parameter = _parameter_of(name, grown)
            if parameter is not None:
                self._grow(name, entry, grown[parameter], is_state=name.startswith(_STATE))
        if self._end:
            files.sync(self._file)
        finish(
            self._partial,
            self._target,
            self._index,
            TrainState(data=data, loss_scale=self._before.loss_scale),
        )

    def discard(self) -> None:
        """Remove the unfinished checkpoint."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _grow(self, name: str, entry: dict[str, Any], start: Tensor, is_state: bool) -> None:
        """Insert the rows of new relations, and of their inverses, into a tensor by relation."""
        size = list(entry["size"])
        old, new = self.old.relations, self.new.relations
        if not size:
            return  # a step count
        blocks, rest = divmod(size[0], old)  # one block of relations, maybe one of inverses
        if (
            rest
            or blocks * new != start.shape[0]
            or (not is_state and size[1:] != [*start.shape[1:]])
        ):
            raise CheckpointError(
                f"{name} of {self.source} has the size {size}, which is not by relation: its "
                "scorer cannot take new relations; extend it by triples of the old ones"
            )
        before = torch.empty(size, dtype=dtype_of(entry))
        read_whole(self.source, self._before_growth, {name: before})
        after = torch.zeros(blocks * new, *size[1:], dtype=before.dtype)
        if not is_state:
            after.copy_(start)
        for block in range(blocks):
            after[block * new : block * new + old] = before[block * old : (block + 1) * old]
        entry["pieces"] = [self._piece(after, [0 for _ in size])]
        entry["size"] = list(after.shape)

    def _piece(self, numbers: Tensor, offset: list[int]) -> dict[str, Any]:
        """Append values to the file of new rows; return their entry in the index."""
        if not is_finite(numbers):
            raise CheckpointError(
                "new rows hold NaN or infinity before training; a smaller model.init_scale may help"
            )
        content = bytes_of(numbers)
        with self._file.open("ab" if self._end else "xb") as file:
            file.write(content)
        start, self._end = self._end, self._end + len(content)
        place = {"file": self._file.name, "start": start, "crc32": zlib.crc32(content)}
        return {"offset": offset, "size": list(numbers.shape), **place}


def shrink_checkpoint(
    source: Path, folder: Path, kept: np.ndarray, tables: Sequence[EntityTable], data: str
) -> None:
    """Write the first checkpoint of a run without some entities, with memory for a few rows.

    No file is shared with the source, so nothing of the deleted rows is left.

    Args:
        source: A checkpoint of the old run.
        folder: The folder ``checkpoints`` of the new run.
        kept: (r,) bool, which of the rows of entities and features stay.
        tables: The entity tables of the old run.
        data: Fingerprint of the new store.

    Raises:
        Damaged, OSError: The checkpoint cannot be read.
    """
    index, before = open_checkpoint(source)
    target = folder / name_of(TrainState())
    partial = folder / f".partial-{target.name}"
    make_empty(partial)
    stays: dict[str | None, np.ndarray] = {}
    for table in tables:
        own = kept[table.ids.start : table.ids.stop]
        stays[table.type] = np.concatenate([stays.get(table.type, kept[:0]), own])
    end = 0
    written: Index = {}
    try:
        with (partial / "kept.bin").open("xb") as file:
            for name, entry in index.items():
                if name.startswith(_RAW):
                    continue
                size, pieces = list(entry["size"]), []
                rows = kept if name == _MODEL + ENTITY_WEIGHT else stays.get(_type_of(name))
                before_row = None if rows is None else np.append(0, np.cumsum(rows))
                for piece in pieces_of(entry):
                    values = read_piece(source, name, dtype_of(entry), piece)
                    offset = list(piece["offset"])
                    if rows is not None and before_row is not None:
                        first = offset[0]
                        values = values[torch.from_numpy(rows[first : first + len(values)])]
                        offset[0] = int(before_row[first])
                    content = bytes_of(values)
                    file.write(content)
                    place = {"start": end, "crc32": zlib.crc32(content)}
                    end += len(content)
                    shape = {"offset": offset, "size": list(values.shape)}
                    if values.numel():
                        pieces.append({**shape, "file": "kept.bin", **place})
                if before_row is not None:
                    size[0] = int(before_row[-1])
                written[name] = {**entry, "size": size, "pieces": pieces}
        files.sync(partial / "kept.bin")
        progress = TrainState(data=data, loss_scale=before.loss_scale)
        finish(partial, target, written, progress)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _free_name(folder: Path) -> Path:
    """Return a free file name for new rows; earlier extensions may have used some."""
    names = (_FILE.format(f"-{n}" if n > 1 else "") for n in itertools.count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def _type_of(name: str) -> str | None:
    """Return the type of the entities whose optimizer state a tensor is, or None."""
    prefix = f"{_STATE}{ENTITY_WEIGHT}."
    return name.removeprefix(prefix).rpartition(".")[0] if name.startswith(prefix) else None


def _parameter_of(name: str, parameters: Iterable[str]) -> str | None:
    """Return the objective's parameter that a tensor of a checkpoint is, or is a state of."""
    own = name.removeprefix(_MODEL).removeprefix(_STATE).removeprefix("objective.")
    of = (p for p in parameters if own == p or own.startswith(f"{p}."))
    return max(of, key=len, default=None)


def entity_rows(checkpoint: Path, stop: int, start: int = 0) -> Iterator[Tensor]:
    """Yield rows [start, stop) of a checkpoint's table in order, (m, D) for each piece.

    Raises:
        Damaged, OSError: The checkpoint cannot be read.
    """
    index, _ = open_checkpoint(checkpoint)
    name = _MODEL + ENTITY_WEIGHT
    for piece in pieces_with(index, name, range(start, stop)):
        first = piece["offset"][0]
        rows = read_piece(checkpoint, name, dtype_of(index[name]), piece)
        yield rows[max(start - first, 0) : stop - first]


def check_numbers(checkpoint: Path) -> None:
    """Check that all values of a checkpoint are finite, reading a few pieces at a time.

    Raises:
        CheckpointError: A value is NaN or infinite.
        Damaged, OSError: The checkpoint cannot be read.
    """
    index, _ = open_checkpoint(checkpoint)
    for name, entry in index.items():

        def check(piece: dict[str, Any], name: str = name, entry: dict[str, Any] = entry) -> None:
            if not is_finite(read_piece(checkpoint, name, dtype_of(entry), piece)):
                raise CheckpointError(
                    f"{checkpoint}: {name} holds NaN or infinity and cannot be trained "
                    "further; choose a different checkpoint with --checkpoint NAME"
                )

        in_threads(check, pieces_of(entry))
