"""Parquet files to record batches."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kge_torchrec.data.streams import COLUMNS, OnBytes, places, unclear
from kge_torchrec.errors import DataError

BATCH_ROWS = 1 << 20


def read_parquet(path: Path, on_bytes: OnBytes | None = None) -> Iterator[pa.RecordBatch]:
    """Batches of the string columns head, relation, tail.

    Columns are found by name where head, relation and tail are among them (or one synonym of each,
    see `header.places`), otherwise a file of exactly three columns is taken in its order.
    Integers become their decimal text.

    Raises:
        DataError: no Parquet file, no rows, other columns, a null or empty field (with its row),
            bytes that are not UTF-8.
    """
    try:
        with pq.ParquetFile(path) as file:
            names = _column_names(path, file.schema_arrow.names)
            total = file.metadata.num_rows
            if total == 0:
                raise DataError(f"{path}: empty file: no triples")
            row = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=names):
                columns = [_strings(path, batch.column(name), name, row) for name in names]
                row += batch.num_rows
                if on_bytes:
                    on_bytes(path.stat().st_size * batch.num_rows // total)
                yield pa.record_batch(columns, list(COLUMNS))
            if row != total:
                raise DataError(f"{path}: announces {total} rows, but {row} are there")
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _column_names(path: Path, names: list[str]) -> list[str]:
    """The file's names of head, relation and tail."""
    found = places(names)
    if found is None and len(set(names)) == len(names) == 3:
        return names
    if found is None:
        raise DataError(
            f"{path}: cannot tell head, relation and tail among the columns {names}: "
            f"{unclear(names)}; name them head, relation and tail"
        )
    return [names[place] for place in found]


def _strings(path: Path, column: pa.Array, name: str, first_row: int) -> pa.Array:
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
    missing = pc.fill_null(pc.equal(pc.binary_length(text), 0), True)
    position = pc.index(missing, True).as_py()
    if position >= 0:
        raise DataError(f"{path}: row {first_row + position + 1}: column {name!r} is empty")
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
