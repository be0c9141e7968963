"""Parquet files to record batches."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kge_torchrec.data.errors import DataError
from kge_torchrec.data.header import COLUMNS, role, roles
from kge_torchrec.data.streams import OnBytes

BATCH_ROWS = 1 << 20


def read_parquet(path: Path, on_bytes: OnBytes | None = None) -> Iterator[pa.RecordBatch]:
    """Batches of the string columns head, relation, tail.

    Columns are found by name where three of them are head, relation and tail (or a synonym that
    `header.roles` knows), otherwise a file of exactly three columns is taken in its order.
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
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _column_names(path: Path, names: list[str]) -> list[str]:
    """The file's names of head, relation and tail."""
    if set(COLUMNS) <= set(names):
        return list(COLUMNS)
    known = [name for name in names if role(name)]
    found = roles(known)
    if found:
        return [known[found.index(wanted)] for wanted in COLUMNS]
    if len(names) == 3:
        return names
    raise DataError(
        f"{path}: cannot tell head, relation and tail among the columns {names}; "
        "name them head, relation and tail"
    )


def _strings(path: Path, column: pa.Array, name: str, first_row: int) -> pa.Array:
    try:
        column = column.cast(pa.large_string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"{path}: column {name!r} of type {column.type} is not text: {error}"
        ) from error
    missing = pc.fill_null(pc.equal(pc.binary_length(column), 0), True)
    position = pc.index(missing, True).as_py()
    if position >= 0:
        raise DataError(f"{path}: row {first_row + position + 1}: column {name!r} is empty")
    return column
