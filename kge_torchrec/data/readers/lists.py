"""Read lists: the types of entities, their features, or the labels of ids.

item:7 <tab> comedy              pairs, and perhaps a weight
item_id,feature,weight           the same with names
item_id,genre,year               other columns: the features are "genre=comedy" and "year=1994"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data import WEIGHT
from kge_torchrec.data.readers.columns import Columns
from kge_torchrec.data.readers.delimited import open_delimited
from kge_torchrec.data.readers.fields import TEXT, Block, Table, batches_of, place_among
from kge_torchrec.data.readers.files import label_files
from kge_torchrec.data.readers.tables import open_parquet
from kge_torchrec.errors import DataError

Notes = list[tuple[str, str]]


def open_list(path: Path, columns: Columns) -> Table:
    """Open a list in text or Parquet."""
    if not path.is_file():
        raise DataError(f"{path}: no such file, which should have {' and '.join(columns.required)}")
    if path.suffix.lower() == ".parquet":
        return open_parquet(path, columns)
    return open_delimited(path, columns, DataConfig())


def read_list(table: Table, labels: LabelFiles | None = None) -> pa.Table:
    """Return the rows of an opened list, whose ids of entities may have labels."""
    return pa.Table.from_batches(batches_of(table, labels))


def read_pairs(
    path: Path, what: str, entities: Mapping[str, str | None], labels: LabelFiles, notes: Notes
) -> pa.Table:
    """Return entities and their type or feature (``what``), and weights if features have some.

    ``entities`` are those of `Columns`, and ``notes`` take how the file was read.
    """
    optional = (WEIGHT, "entity_type") if what == "feature" else ()
    columns = Columns(("entity", what), optional, optional[:1], entities=entities, key="")
    table = open_list(path, columns)
    notes.extend(table.notes)
    return read_list(_melted(table) if table.found.others else table, labels)


def _melted(table: Table) -> Table:
    """Return a table with a row for each cell of the further columns that is not empty."""

    def blocks() -> Iterator[Block]:
        for cells, place in table.blocks:
            for name, at in table.found.others.items():
                text = pc.fill_null(cells[at].cast(TEXT), "")
                rows = np.flatnonzero(pc.not_equal(text, "").to_numpy(zero_copy_only=False))
                own = {x: cells[x].take(pa.array(rows)) for x in table.found.places.values()}
                parts = pa.scalar(name, TEXT), text.take(pa.array(rows)), pa.scalar("=", TEXT)
                own[-1] = pc.binary_join_element_wise(*parts)
                yield own, place_among(place, rows)

    found = table.found._replace(places={**table.found.places, "feature": -1}, others={})
    return table._replace(found=found, blocks=blocks())


class LabelFile:
    """The labels (N,) of ids (N,), by a file such as entity2id.txt or entities.dict.

    Unless a key names the file, the first ids say whether it is used, and ``notes`` take that.
    """

    def __init__(self, path: Path, data: DataConfig, is_named: bool, notes: Notes):
        self.path, self._notes = path, notes
        self._used: bool | None = is_named or None
        given = {"id": data.labels.id_column, "label": data.labels.label_column}
        places = {role: place for role, place in given.items() if place is not None}
        table = open_list(path, Columns(("id", "label"), (), places=places, key="data.labels"))
        columns = read_list(table).combine_chunks()
        self._ids, self._labels = (columns[name].chunk(0) for name in ("id", "label"))
        if table.found.by_order:
            both = self._ids, self._labels
            numbers = [pc.all(pc.match_substring_regex(x, "^[0-9]+$")).as_py() for x in both]
            if numbers[0] == numbers[1]:
                raise DataError(
                    f"{path}: both columns or none hold numbers, so it is unclear which are the "
                    "ids; say so with data.labels.id_column 0 or 1"
                )
            self._ids, self._labels = both[:: 1 if numbers[0] else -1]
        for column, what in ((self._ids, "id"), (self._labels, "label")):
            counts = pc.value_counts(column)
            twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
            if len(twice):
                raise DataError(f"{path}: the {what} {twice[0].as_py()!r} is there twice")

    def labels_of(self, ids: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the labels of ids (B,), and which of them are unknown."""
        known = pc.index_in(ids, value_set=self._ids)
        if self._used is None:
            self._decide(ids, known)
        if not self._used:
            return ids, pa.array([], pa.bool_())
        return self._labels.take(known), known.is_null()

    def _decide(self, ids: pa.Array, known: pa.Array) -> None:
        """Decide by the first ids whether they are ids of this file, labels of it, or neither."""
        are_labels = pc.all(pc.is_in(ids, value_set=self._labels)).as_py()
        if are_labels and not known.null_count:
            raise DataError(
                f"{self.path}: the triples may hold its ids or its labels; data.labels names the "
                "file if they are ids, and has none instead if they are labels"
            )
        self._used = not are_labels and known.null_count * 2 <= len(ids)
        said = "its labels take the place of ids; data.labels sets other files or none"
        if not self._used:
            what = "its labels" if are_labels else "few of its ids"
            said = f"not used: the triples have {what}; data.labels names files that are"
        self._notes.append((str(self.path), said))


LabelFiles: TypeAlias = Mapping[str, LabelFile]  # of "entities" and "relations"


def find_labels(data: DataConfig, folder: Path | None, notes: Notes) -> LabelFiles:
    """Return the files of labels that keys name or that are in the folder of the triples."""
    files: dict[str, LabelFile] = {}
    for kind in ("entities", "relations"):
        named = getattr(data.labels, kind)
        beside = label_files(folder, kind) if named is None and folder is not None else []
        if len(beside) > 1:
            raise DataError(
                f"{beside[0]} and {beside[1]} may both have the labels of {kind}; name one with "
                f"data.labels.{kind}, or none"
            )
        path = beside[0] if beside else Path(named or "none")
        if path != Path("none"):
            files[kind] = LabelFile(path, data, named is not None, notes)
    return files
