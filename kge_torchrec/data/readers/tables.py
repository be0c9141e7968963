"""Parquet files to record batches."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kge_torchrec.data.labels import fault_of, first_fault
from kge_torchrec.data.streams import (
    COLUMNS,
    WEIGHT,
    ColumnChoice,
    FirstLine,
    OnBytes,
    OnFirstLine,
    is_weight_name,
    places,
    unclear,
)
from kge_torchrec.data.weights import NotAWeight, parse_weights
from kge_torchrec.errors import DataError

BATCH_ROWS = 1 << 20


def read_parquet(
    path: Path,
    on_bytes: OnBytes | None = None,
    choice: ColumnChoice = ColumnChoice(),  # noqa: B008 - immutable
    on_first_line: OnFirstLine | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches of the string columns head, relation, tail, and float32 weight where there is one.

    Columns are found by name where head, relation and tail are among them (or one synonym of each,
    see `streams.places`), otherwise a file of exactly three columns is taken in its order.
    Integers become their decimal text.  ``on_first_line`` gets the columns that were taken, where
    neither their names nor ``choice`` leave no doubt.

    Raises:
        DataError: no Parquet file, no rows, other columns, a field that is null or no label (with
            its row), a weight that is not positive and finite, bytes that are not UTF-8.
    """
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
    """A table's names of head, relation and tail, and of the weight if there is one.

    Raises DataError, naming the ``source``, where they cannot be told.
    """
    if choice.names is not None:
        if choice.named(names) is None:
            raise DataError(f"{source}: columns by name: {choice.lacking(names)}")
        return list(choice.names)
    found, weight = places(names), [name for name in names if is_weight_name(name)]
    weight = [] if choice.weights is False or len(weight) > 1 else weight
    if found is not None:
        return [*(names[place] for place in found), *weight]
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
    """The named columns of a table as head, relation, tail, and the weight if it is named.

    Raises DataError for a field that is none, by its row.
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
    position = first_fault(text)
    if position is not None:
        fault = fault_of(text[position].as_py() or "")
        raise DataError(f"{path}: row {first_row + position + 1}: column {name!r} {fault}")
    return text


def _undecodable(column: pa.Array) -> int | None:
    """The first row whose bytes are not UTF-8, looked for row by row."""
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
