"""Read the labels of ids from a file of two columns, such as entity2id.txt or entities.dict.

OpenKE, LibKGE, DGL-KE and others write triples of numbers, and files of numbers and labels beside
them.  Numbers may have gaps.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data.readers.columns import Columns
from kge_torchrec.data.readers.fields import batches_of
from kge_torchrec.data.readers.files import label_files
from kge_torchrec.data.readers.lists import open_list
from kge_torchrec.errors import DataError


class LabelFile:
    """The labels of ids.

    Args:
        path: The file.
        data: The options of reading, with ``data.labels``.
        is_named: Whether a key names the file; otherwise the first ids say whether it is used.
        notes: Takes whether a file that no key names is used.

    Raises:
        DataError: An id or a label is there twice, or it is unclear which column has the ids.
    """

    def __init__(self, path: Path, data: DataConfig, is_named: bool, notes: list[tuple[str, str]]):
        self.path, self._notes = path, notes
        self._used: bool | None = is_named or None
        self._ids, self._labels = _columns(path, data)
        for column, what in ((self._ids, "id"), (self._labels, "label")):
            if len(pc.unique(column)) < len(column):
                counts = pc.value_counts(column)
                twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
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


def find_labels(
    data: DataConfig, folder: Path | None, notes: list[tuple[str, str]]
) -> dict[str, LabelFile]:
    """Return the files of labels that keys name or that are in the folder of the triples."""
    files: dict[str, LabelFile] = {}
    for kind in ("entities", "relations"):
        named = getattr(data.label_options, kind)
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
            files[kind] = LabelFile(path, data, named is not None, notes)
    return files


def _columns(path: Path, data: DataConfig) -> tuple[pa.Array, pa.Array]:
    """Return the ids and the labels of a file."""
    options = data.label_options
    given = {"id": options.id_column, "label": options.label_column}
    places = {role: place for role, place in given.items() if place is not None}
    columns = Columns(("id", "label"), (), places=places, key="data.labels")
    table = open_list(path, columns)
    read = pa.Table.from_batches(batches_of(table)).combine_chunks()
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
