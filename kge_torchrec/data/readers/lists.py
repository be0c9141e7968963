"""Read lists: the types of entities, their features, or the labels of ids.

item:7 <tab> comedy              pairs, and perhaps a weight
item_id,feature,weight           the same with names
item_id,genre,year               other columns: the features are "genre=comedy" and "year=1994"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data import WEIGHT
from kge_torchrec.data.readers.columns import Columns
from kge_torchrec.data.readers.delimited import open_delimited
from kge_torchrec.data.readers.fields import (
    TEXT,
    Block,
    LabelFile,
    LabelFiles,
    Table,
    batches_of,
    place_among,
)
from kge_torchrec.data.readers.files import label_files
from kge_torchrec.data.readers.tables import open_parquet
from kge_torchrec.errors import DataError


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


def read_types(path: Path, labels: LabelFiles | None = None) -> pa.Table:
    """Return the columns entity and type of a file of such pairs."""
    return read_list(open_list(path, Columns(("entity", "type"), (), key="")), labels)


def read_features(
    path: Path,
    entities: Mapping[str, str | None] | None = None,
    labels: LabelFiles | None = None,
    notes: list[tuple[str, str]] | None = None,
) -> pa.Table:
    """Return the features of a file: columns entity, feature and weight.

    ``entities`` are those of `Columns`, and ``notes`` take how the file was read.
    """
    optional = WEIGHT, "entity_type"
    columns = Columns(("entity", "feature"), optional, (WEIGHT,), entities=entities or {}, key="")
    table = open_list(path, columns)
    if notes is not None:
        notes.extend(table.notes)
    rows = read_list(_melted(table) if table.found.others else table, labels)
    if WEIGHT not in rows.column_names:
        rows = rows.append_column(WEIGHT, pa.repeat(pa.scalar(1, pa.float32()), len(rows)))
    return rows


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


def find_labels(data: DataConfig, folder: Path | None, notes: list[tuple[str, str]]) -> LabelFiles:
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
            if not path.is_file():
                raise DataError(f"data.labels.{kind}: {path}: no such file")
            files[kind] = LabelFile(f"{path}", *_ids(path, data), named is not None, notes)
    return files


def _ids(path: Path, data: DataConfig) -> tuple[pa.Array, pa.Array]:
    """Return the ids and the labels of a file."""
    given = {"id": data.labels.id_column, "label": data.labels.label_column}
    places = {role: place for role, place in given.items() if place is not None}
    table = open_list(path, Columns(("id", "label"), (), places=places, key="data.labels"))
    read = read_list(table).combine_chunks()
    ids, labels = (read[name].chunk(0) for name in ("id", "label"))
    if table.found.by_order:
        numbers = [pc.all(pc.match_substring_regex(c, "^[0-9]+$")).as_py() for c in (ids, labels)]
        if numbers[0] == numbers[1]:
            raise DataError(
                f"{path}: both columns or none hold numbers, so it is unclear which are the ids; "
                "say so with data.labels.id_column 0 or 1"
            )
        if numbers[1]:
            ids, labels = labels, ids
    return ids, labels
