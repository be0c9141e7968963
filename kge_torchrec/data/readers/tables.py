"""Read tables of triples: Parquet files, and triples in memory."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from kge_torchrec.data import COLUMNS, WEIGHT
from kge_torchrec.data.labels import first_fault
from kge_torchrec.data.readers.columns import (
    ColumnChoice,
    FirstLine,
    NotAWeight,
    OnFirstLine,
    is_weight_name,
    parse_weights,
    places,
    unclear,
)
from kge_torchrec.data.streams import OnBytes
from kge_torchrec.errors import DataError

BATCH_ROWS = 1 << 20


def read_parquet(
    path: Path,
    on_bytes: OnBytes | None = None,
    choice: ColumnChoice = ColumnChoice(),  # noqa: B008 - immutable
    on_first_line: OnFirstLine | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the string columns head, relation, tail, and float32 weight if there is one.

    Columns are found by their names, or by one synonym of each (`columns.places`); otherwise a file
    of exactly three columns is read in its order.  Integers become their decimal text.

    Args:
        path: The file.
        on_bytes: Called with the number of bytes just read.
        choice: Which columns are read.
        on_first_line: Called with the columns that were read if their names leave a doubt and
            ``choice`` does not name them.

    Raises:
        DataError: No Parquet file, no rows, other columns, a field that is null or no label (with
            its row), a weight that is not positive and finite, bytes that are not UTF-8.
    """
    import pyarrow.parquet as pq  # starts threads

    try:
        with pq.ParquetFile(path) as file:
            fields = file.schema_arrow.names
            names = column_names(str(path), fields, choice)
            guessed = choice.names is None and {*fields} - {WEIGHT} != {*COLUMNS}
            if on_first_line and guessed:
                named = dict(zip((*COLUMNS, WEIGHT), names, strict=False))
                on_first_line(FirstLine(str(path), None, fields, named))
            total = file.metadata.num_rows
            if total == 0:
                raise DataError(f"{path}: empty file: no triples")
            row = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=names):
                triples = column_batch(str(path), batch, names, row)
                row += batch.num_rows
                if on_bytes:
                    on_bytes(path.stat().st_size * batch.num_rows // total)
                yield triples
            if row != total:
                raise DataError(f"{path}: announces {total} rows, but {row} are there")
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def column_names(source: str, names: list[str], choice: ColumnChoice) -> list[str]:
    """Return a table's names of head, relation and tail, and of the weight if there is one.

    Raises:
        DataError: The names are unclear; the message names the ``source``.
    """
    if choice.names is not None:
        if choice.named(names) is None:
            raise DataError(f"{source}: columns by name: {choice.lacking(names)}")
        return list(choice.names)
    positions, weight = places(names), [name for name in names if is_weight_name(name)]
    weight = [] if choice.weights is False or len(weight) > 1 else weight
    if positions is not None:
        return [*(names[place] for place in positions), *weight]
    rest = [name for name in names if name not in weight]
    if len(set(rest)) == len(rest) == 3:
        return [*rest, *weight]
    if choice.weights and len(set(names)) == len(names) == 4:
        return names
    raise DataError(
        f"{source}: cannot tell head, relation and tail among the columns {names}: "
        f"{unclear(names)}; name them head, relation and tail, or say what they are with",
        columns=["HEAD", "RELATION", "TAIL"],
    )


def column_batch(
    source: str, batch: pa.RecordBatch, names: list[str], first_row: int
) -> pa.RecordBatch:
    """Return the named columns of a table as head, relation, tail, and the weight if it is named.

    Raises:
        DataError: A field is no label or no weight, named by its row.
    """
    columns = [_strings(source, batch.column(name), name, first_row) for name in names[:3]]
    if len(names) == 4:
        try:
            columns.append(parse_weights(batch.column(names[3])))
        except NotAWeight as error:
            raise DataError(
                f"{source}: row {first_row + error.row + 1}: column {names[3]!r} is no weight: "
                f"{error}"
            ) from None
    return pa.record_batch(columns, [*COLUMNS, WEIGHT][: len(columns)])


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


def batches_of(split: str, rows: InMemory) -> Iterator[pa.RecordBatch]:
    """Yield batches of the string columns head, relation, tail and weight from triples in memory.

    Raises:
        DataError: A triple has not three or four fields, a label is no string, or a weight is not
            positive and finite; named by split and triple.
    """
    try:
        source = _table(split, rows)
        labels = source.select(list(COLUMNS))
        table = labels.cast(pa.schema([(name, pa.large_string()) for name in COLUMNS]))
        table.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{split}: labels must be strings: {error}") from error
    for role in COLUMNS:
        if fault := first_fault(table[role].combine_chunks()):
            raise DataError(f"{split}: triple {fault.row}: the {role} {fault.reason}")
    if WEIGHT in source.column_names:
        try:
            weights = parse_weights(source[WEIGHT].combine_chunks())
        except NotAWeight as error:
            raise DataError(f"{split}: triple {error.row}: its weight is {error}") from None
        table = table.append_column(WEIGHT, weights)
    yield from table.to_batches()


def _table(split: str, rows: InMemory) -> pa.Table:
    if hasattr(rows, "__arrow_c_stream__"):  # tables, and data frames
        rows = pa.table(rows)
        by_name = set(COLUMNS) <= set(rows.column_names)
        names = [*COLUMNS, *({WEIGHT} & set(rows.column_names))] if by_name else rows.column_names
        columns = rows.select(names).columns
    elif isinstance(rows, np.ndarray):
        columns = [pa.array(column) for column in rows.T]
    else:
        rows = list(rows)
        for position, row in enumerate(rows):
            if len(row) not in (3, 4) or len(row) != len(rows[0]):
                raise DataError(f"{split}: triple {position} has {len(row)} fields: {row!r}")
        fields = list(zip(*rows, strict=True))
        columns = [pa.array(column, pa.large_string()) for column in fields[:3]]
        columns = columns or [pa.array([], pa.large_string())] * 3
        columns += [pa.array(column) for column in fields[3:]]
    if len(columns) not in (3, 4):
        raise DataError(f"{split}: {len(columns)} columns instead of head, relation, tail")
    return pa.table(list(columns), [*COLUMNS, WEIGHT][: len(columns)])
