"""Read tables of triples: Parquet files, triples in memory, and files of numbered triples.

OpenKE and LibKGE write triples of numbers, with files of labels beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from kge_torchrec.data import COLUMNS, TIME, WEIGHT
from kge_torchrec.data.labels import fault_of, first_fault
from kge_torchrec.data.readers.columns import (
    EDGE,
    TYPES,
    ColumnChoice,
    FirstLine,
    NotATime,
    NotAWeight,
    OnFirstLine,
    is_weight_name,
    parse_times,
    parse_weights,
    places,
    role,
    unclear,
    with_types,
)
from kge_torchrec.data.streams import bare_name, lines, open_bytes, text_lines, unreadable
from kge_torchrec.errors import DataError

BATCH_ROWS = 1 << 20


def read_parquet(
    path: Path,
    choice: ColumnChoice = ColumnChoice(),  # noqa: B008 - immutable
    on_first_line: OnFirstLine | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the string columns head, relation, tail, and of weight and time if any.

    Columns are found by their names, or by one synonym of each (`columns.places`); otherwise a file
    of exactly three columns is read in its order.  Integers become their decimal text.

    Args:
        path: The file.
        choice: Which columns are read.
        on_first_line: Called with the columns that were read if their names leave a doubt and
            ``choice`` does not name them.

    Raises:
        DataError: No Parquet file, no rows, other columns, a field that is null or no label (with
            its row), a weight that is not positive and finite, a time that is no number and no
            date, bytes that are not UTF-8.
    """
    import pyarrow.parquet as pq  # starts threads

    try:
        with pq.ParquetFile(path) as file:
            fields = file.schema_arrow.names
            types = [] if choice.names or not set(TYPES) <= set(fields) else [*TYPES]
            names = column_names(str(path), [f for f in fields if f not in types], choice)
            guessed = choice.names is None and {*fields} - {WEIGHT} != {*COLUMNS}
            if on_first_line and guessed:
                named = names | dict(zip(types, types, strict=True))
                on_first_line(FirstLine(str(path), None, fields, named))
            total = file.metadata.num_rows
            if total == 0:
                raise DataError(f"{path}: empty file: no triples")
            row = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=[*names.values(), *types]):
                triples = column_batch(str(path), batch, names, row)
                for name in types:
                    column = _strings(str(path), batch.column(name), name, row)
                    triples = triples.append_column(name, column)
                triples = with_types(str(path), triples, choice.edge)
                row += batch.num_rows
                yield triples
            if row != total:
                raise DataError(f"{path}: announces {total} rows, but {row} are there")
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def column_names(source: str, names: list[str], choice: ColumnChoice) -> dict[str, str]:
    """Return a table's names of head, relation and tail, and of weight and time if it has them.

    Raises:
        DataError: The names are unclear; the message names the ``source``.
    """
    choice.check_time_column(source, names)
    place = choice.time_place(names)
    time = {} if place is None or not choice.time else {TIME: names[place]}
    if place is not None:
        names = [*names[:place], *names[place + 1 :]]
    meant = (*(EDGE if choice.edge else COLUMNS), WEIGHT)
    return dict(zip(meant, _triple_columns(source, names, choice), strict=False)) | time


def _triple_columns(source: str, names: list[str], choice: ColumnChoice) -> list[str]:
    """Return a table's names of head, relation and tail, and of the weight if there is one."""
    if choice.names is not None:
        if choice.named(names) is None:
            raise DataError(f"{source}: columns by name: {choice.lacking(names)}")
        return list(choice.names)
    weight = [name for name in names if is_weight_name(name)]
    weight = [] if choice.weights is False or len(weight) > 1 else weight
    if choice.edge is not None:
        return _edge_columns(source, names, weight)
    positions = places(names)
    if positions is not None:
        return [*(names[place] for place in positions), *weight]
    rest = [name for name in names if name not in weight]
    if len(set(rest)) == len(rest) == 3:
        return [*rest, *weight]
    if choice.weights and len(set(names)) == len(names) == 4:
        return names
    raise DataError(
        f"{source}: cannot tell head, relation and tail among the columns {names}: "
        f"{unclear(names)}; name them head, relation and tail, or say what they are with "
        "data.columns [HEAD, RELATION, TAIL]"
    )


def _edge_columns(source: str, names: list[str], weight: list[str]) -> list[str]:
    """Return a table's names of the heads and tails of edges, and of the weight if there is one."""
    meant = [role(name) for name in names]
    by_word = [names[meant.index(end)] for end in EDGE if meant.count(end) == 1]
    rest = [name for name in names if name not in weight]
    if len(by_word) < 2 and len(rest) != 2:
        raise DataError(f"{source}: cannot tell head and tail among the columns {names}")
    return [*(by_word if len(by_word) == 2 else rest), *weight]


def column_batch(
    source: str, batch: pa.RecordBatch, names: Mapping[str, str], first_row: int
) -> pa.RecordBatch:
    """Return the named columns of a table as head, relation, tail, and weight and time if named.

    Args:
        source: Name of the table in messages.
        batch: The columns.
        names: The name of each column that is read, by what it is.
        first_row: Number of the first row in the table.

    Raises:
        DataError: A field is no label, no weight or no time, named by its row.
    """
    columns = {}
    for meant, name in names.items():
        column = batch.column(name)
        try:
            if meant == WEIGHT:
                columns[meant] = parse_weights(column)
            elif meant == TIME:
                columns[meant] = parse_times(column)
            else:
                columns[meant] = _strings(source, column, name, first_row)
        except (NotAWeight, NotATime) as error:
            raise DataError(
                f"{source}: row {first_row + error.row + 1}: column {name!r} is no {meant}: {error}"
            ) from None
    return pa.record_batch(columns)


def _strings(path: str, column: pa.Array, name: str, first_row: int) -> pa.Array:
    try:
        text = column.cast(pa.large_string())
        text.validate(full=True)  # a file's text need not be UTF-8
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        row = _undecodable(column)
        if row is not None:
            place = f"{path}: row {first_row + row + 1}"
            raise DataError(f"{place}: column {name!r} is not UTF-8") from error
        raise DataError(
            f"{path}: column {name!r} of type {column.type} is not text: {error}"
        ) from error
    if fault := first_fault(text):
        place = f"{path}: row {first_row + fault.row + 1}"
        raise DataError(f"{place}: column {name!r} {fault.reason}")
    return text


def _undecodable(column: pa.Array) -> int | None:
    """Return the first row whose bytes are not UTF-8, or None."""
    try:
        values = column.cast(pa.large_binary())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    for row, value in enumerate(values):
        try:
            (value.as_py() or b"").decode("utf-8")
        except UnicodeDecodeError:
            return row
    return None


InMemory: TypeAlias = pa.Table | np.ndarray | Iterable[tuple[Any, ...]]  # or a data frame


def batches_of(
    split: str,
    rows: InMemory,
    choice: ColumnChoice = ColumnChoice(),  # noqa: B008 - immutable
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the string columns head, relation, tail, weight and time from memory.

    Args:
        split: Name of the triples in messages.
        rows: The triples.
        choice: Whether they have times.

    Raises:
        DataError: A triple has another number of fields, a label is no string, a weight is not
            positive and finite, or a time is no number and no date; named by split and triple.
    """
    try:
        source = _table(split, rows, choice)
        labels = source.select(list(COLUMNS))
        table = labels.cast(pa.schema([(name, pa.large_string()) for name in COLUMNS]))
        table.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{split}: labels must be strings: {error}") from error
    for part in COLUMNS:
        if fault := first_fault(table[part].combine_chunks()):
            raise DataError(f"{split}: triple {fault.row}: the {part} {fault.reason}")
    for name, parse in ((WEIGHT, parse_weights), (TIME, parse_times)):
        if name in source.column_names:
            try:
                table = table.append_column(name, parse(source[name].combine_chunks()))
            except (NotAWeight, NotATime) as error:
                raise DataError(f"{split}: triple {error.row}: its {name}: {error}") from None
    yield from table.to_batches()


def _table(split: str, rows: InMemory, choice: ColumnChoice) -> pa.Table:
    timed = bool(choice.time)
    if hasattr(rows, "__arrow_c_stream__"):  # tables, and data frames
        rows = pa.table(rows)
        names = rows.column_names
        choice.check_time_column(split, names)
        place = choice.time_place(names)
        times = [] if place is None else [names[place]]
        names = [name for name in names if name not in times]
        if set(COLUMNS) <= set(names):
            names = [*COLUMNS, *({WEIGHT} & set(names))]
        timed = timed and bool(times)
        columns = rows.select([*names, *(times if timed else ())]).columns
    elif isinstance(rows, np.ndarray):
        columns = [pa.array(column) for column in rows.T]
    else:
        rows = list(rows)
        timed = timed and bool(rows)
        for position, row in enumerate(rows):
            if len(row) - timed not in (3, 4) or len(row) != len(rows[0]):
                end = "; the last one should be its time" if timed else ""
                raise DataError(f"{split}: triple {position} has {len(row)} fields: {row!r}{end}")
        fields = list(zip(*rows, strict=True))
        columns = [pa.array(column, pa.large_string()) for column in fields[:3]]
        columns = columns or [pa.array([], pa.large_string())] * 3
        columns += [pa.array(column) for column in fields[3:]]
    if len(columns) - timed not in (3, 4):
        raise DataError(f"{split}: {len(columns)} columns instead of head, relation, tail")
    names = [*COLUMNS, WEIGHT][: len(columns) - timed]
    return pa.table(list(columns), [*names, *([TIME] if timed else [])])


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


def read_id_files(path: Path, layout: Layout) -> Iterator[pa.RecordBatch]:
    """Yield batches of the string columns head, relation, tail.

    Raises:
        DataError: A row that is not three numbers, a number without a label, a wrong count, named
            by file and line; or a missing file of labels.
    """
    entities = _labels(path.with_name(layout.entities), layout)
    relations = _labels(path.with_name(layout.relations), layout)
    labels = {"head": entities, "relation": relations, "tail": entities}
    for batch in _number_table(path, layout, dict.fromkeys(layout.columns, pa.int64())):
        for part in COLUMNS:
            ids = batch[part].to_numpy()
            if len(ids) and not (ids.min() >= 0 and ids.max() < len(labels[part])):
                sizes = {name: len(values) for name, values in labels.items()}
                fault = _fault(path, layout, layout.columns, sizes)
                raise fault or DataError(f"{path}: an id has no label")
        yield pa.record_batch([labels[part].take(batch[part]) for part in COLUMNS], list(COLUMNS))


def _labels(path: Path, layout: Layout) -> pa.Array:
    """Return labels in order of their number."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; it should hold the labels of the numbered triples")
    columns = {"label": pa.large_string(), "id": pa.int64()}
    if not layout.label_first:
        columns = dict(reversed(columns.items()))
    batches = _number_table(path, layout, columns)
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


def _number_table(
    path: Path,
    layout: Layout,
    types: dict[str, pa.DataType],
) -> Iterator[pa.RecordBatch]:
    skip, delimiter, count = _start(path, layout)
    rows = 0
    try:
        with open_bytes(path) as stream:
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
