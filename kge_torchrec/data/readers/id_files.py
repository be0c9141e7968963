"""Read files of numbered triples with files of labels beside them, as of OpenKE and LibKGE."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from kge_torchrec.data import COLUMNS
from kge_torchrec.data.labels import fault_of, first_fault
from kge_torchrec.data.streams import OnBytes, bare_name, lines, open_bytes, text_lines, unreadable
from kge_torchrec.errors import DataError


class Layout(NamedTuple):
    """How a program writes triples and labels.

    Args:
        entities, relations: Names of the files of labels.
        columns: Order of the columns of triples.
        label_first: Whether a label comes before its number.
        counted: Whether the first line is the number of the others.
    """

    entities: str
    relations: str
    columns: tuple[str, str, str]
    label_first: bool
    counted: bool


OPENKE = Layout("entity2id.txt", "relation2id.txt", ("head", "tail", "relation"), True, True)
LIBKGE = Layout("entity_ids.del", "relation_ids.del", COLUMNS, False, False)


def layout_of(path: Path) -> Layout | None:
    """Return OPENKE for ``train2id.txt``, LIBKGE for ``train.del``, otherwise None."""
    name = bare_name(path).lower()
    if name.endswith("2id.txt"):
        return OPENKE
    return LIBKGE if name.endswith(".del") else None


def read_id_files(
    path: Path, layout: Layout, on_bytes: OnBytes | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the string columns head, relation, tail.

    Raises:
        DataError: A row that is not three numbers, a number without a label, a wrong count, named
            by file and line; or a missing file of labels.
    """
    entities = _labels(path.with_name(layout.entities), layout)
    relations = _labels(path.with_name(layout.relations), layout)
    labels = {"head": entities, "relation": relations, "tail": entities}
    for batch in _table(path, layout, dict.fromkeys(layout.columns, pa.int64()), on_bytes):
        for role in COLUMNS:
            ids = batch[role].to_numpy()
            if len(ids) and not (ids.min() >= 0 and ids.max() < len(labels[role])):
                sizes = {name: len(values) for name, values in labels.items()}
                fault = _fault(path, layout, layout.columns, sizes)
                raise fault or DataError(f"{path}: an id has no label")
        yield pa.record_batch([labels[role].take(batch[role]) for role in COLUMNS], list(COLUMNS))


def _labels(path: Path, layout: Layout) -> pa.Array:
    """Return labels in order of their number."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; it should hold the labels of the numbered triples")
    columns = {"label": pa.large_string(), "id": pa.int64()}
    if not layout.label_first:
        columns = dict(reversed(columns.items()))
    batches = _table(path, layout, columns)
    table = pa.Table.from_batches(batches, pa.schema(list(columns.items())))
    if first_fault(table["label"].combine_chunks()):
        raise _fault(path, layout, tuple(columns), {}) or DataError(f"{path}: a label is empty")
    ids = table["id"].to_numpy()
    order = np.argsort(ids)
    if not np.array_equal(ids[order], np.arange(len(ids))):
        missing = np.setdiff1d(np.arange(len(ids)), ids)[0]
        raise DataError(
            f"{path}: the ids are not 0 to {len(ids) - 1}, each once: there is no {missing}"
        )
    return table["label"].combine_chunks().take(pa.array(order))


def _table(
    path: Path,
    layout: Layout,
    types: dict[str, pa.DataType],
    on_bytes: OnBytes | None = None,
) -> Iterator[pa.RecordBatch]:
    skip, delimiter, count = _start(path, layout)
    rows = 0
    try:
        with open_bytes(path, on_bytes) as stream:
            for batch in arrow_csv.open_csv(
                stream,
                read_options=arrow_csv.ReadOptions(column_names=list(types), skip_rows=skip),
                parse_options=arrow_csv.ParseOptions(delimiter=delimiter, quote_char=False),
                convert_options=arrow_csv.ConvertOptions(column_types=types, null_values=[]),
            ):
                rows += batch.num_rows
                yield batch
    except pa.ArrowInvalid as error:
        fault = _fault(path, layout, tuple(types), {})
        raise fault or DataError(f"{path}: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not rows:
        raise DataError(f"{path}: empty file: no {'labels' if 'label' in types else 'triples'}")
    if count not in (None, rows):
        raise DataError(f"{path}:1: announces {count} rows, but {rows} follow")


def _start(path: Path, layout: Layout) -> tuple[int, str, int | None]:
    """Return the lines to skip, the delimiter, and the announced number of rows."""
    first = [line.decode("utf-8", "replace") for _, line in islice(lines(path), 2)]
    if len(first) <= layout.counted or not any(first):
        raise DataError(f"{path}: empty file: no triples")
    if layout.counted and not _is_number(first[0]):
        raise DataError(f"{path}:1: expected the number of rows, found {first[0]!r}")
    delimiter = "\t" if "\t" in first[layout.counted] else " "
    return int(layout.counted), delimiter, int(first[0]) if layout.counted else None


def _fault(
    path: Path, layout: Layout, columns: tuple[str, ...], sizes: dict[str, int]
) -> DataError | None:
    """Return the error of the first faulty row, found by reading the file again row by row."""
    skip, delimiter, _ = _start(path, layout)
    rows = islice(text_lines(path), skip, None)
    while True:
        try:
            number, text = next(rows, (0, ""))
        except DataError as error:
            return error
        if not number:
            return None
        if "\r" in text:
            return DataError(f"{path}:{number}: carriage return inside the line: {text!r}")
        fields = text.split(delimiter)
        if text and len(fields) != len(columns):
            return DataError(
                f"{path}:{number}: expected {len(columns)} columns ({', '.join(columns)}), "
                f"found {len(fields)}: {text!r}"
            )
        for column, field in zip(columns, fields, strict=False):
            if not text:
                continue
            if column == "label":
                fault = fault_of(field)
                if fault is not None:
                    return DataError(f"{path}:{number}: the label {fault}")
            elif not _is_number(field):
                return DataError(f"{path}:{number}: the {column} is no number: {field!r}")
            elif int(field) >= sizes.get(column, 1 << 63):
                return DataError(f"{path}:{number}: the {column} {field} has no label")


def _is_number(text: str) -> bool:
    """Return whether a text is ASCII digits that fit 64 bits; Python counts others as digits."""
    text = text.strip(" ")
    return text.isascii() and text.isdigit() and len(text) < 19
