"""Read tables of triples: Parquet files, triples in memory, and the batches of other readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from kge_torchrec.data.readers.columns import Columns
from kge_torchrec.data.readers.fields import Block, Table, no_rows
from kge_torchrec.errors import DataError

BATCH_ROWS = 1 << 20

# Rows of fields, an array (T, 3), an Arrow table, or a data frame with ``__arrow_c_stream__``.
InMemory: TypeAlias = pa.Table | np.ndarray | Iterable[tuple[Any, ...]]


def open_parquet(path: Path, columns: Columns) -> Table:
    """Open a Parquet file, whose columns are found by their names.

    Raises:
        DataError: Columns are missing or unclear, or it is no Parquet file.
    """
    import pyarrow.parquet as pq  # starts threads

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    total = file.metadata.num_rows
    if not total:
        raise no_rows(path, columns)

    def batches(used: list[str]) -> Iterator[pa.RecordBatch]:
        rows = 0
        try:
            with file:
                for batch in file.iter_batches(BATCH_ROWS, columns=used):
                    rows += batch.num_rows
                    yield batch
        except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from error
        if rows != total:
            raise DataError(f"{path}: announces {total} rows, but {rows} are there")

    return open_named(str(path), file.schema_arrow.names, batches, columns, "row", 1)


def open_named(
    source: str,
    names: list[str],
    batches: Callable[[list[str]], Iterable[pa.RecordBatch]],
    columns: Columns,
    row: str = "triple",
    first: int = 0,
) -> Table:
    """Open a table whose columns have names.

    ``batches`` takes names, and returns batches with at least the columns of these names.  Messages
    call the table ``source``, and count its rows from ``first``.

    Raises:
        DataError: Columns are missing or unclear.
    """
    found, notes = columns.find(source, names, True), []
    as_named = all(names[at] == role for role, at in found.places.items())
    if not columns.is_given and not (as_named and len(found.places) == len(names)):
        remedy = f"; {columns.key} ROLE=COLUMN,... reads others" if columns.key else ""
        notes.append((source, f"columns are read as {found}{remedy}"))
    used = {at: names[at] for at in (*found.places.values(), *found.others.values())}

    def blocks() -> Iterator[Block]:
        start = first
        for batch in batches([*used.values()]):
            for name in used.values():
                if (count := batch.schema.names.count(name)) != 1:
                    raise DataError(f"{source}: {count} columns have the name {name!r}")

            def place(at: int, start: int = start) -> str:
                return f"{source}: {row} {start + at}"

            yield {at: batch.column(name) for at, name in used.items()}, place
            start += batch.num_rows

    return Table(source, columns, found, blocks(), notes)


def open_batches(source: str, batches: Iterator[pa.RecordBatch], columns: Columns) -> Table:
    """Open a table by its batches, the first of which has its names; else as `open_named`."""
    start = next(batches, None)
    if start is None:
        raise DataError(f"{source} gave no triples")
    rows = chain([start], batches)
    return open_named(source, start.schema.names, lambda _: rows, columns)


def open_memory(name: str, rows: InMemory, columns: Columns) -> Table:
    """Open triples in memory, which have a name in messages.

    Raises:
        DataError: Columns are missing or unclear, or rows have other numbers of fields.
    """
    if hasattr(rows, "__arrow_c_stream__"):  # tables, and data frames
        table = pa.table(rows)
        # Columns of views and dictionaries are whole in a batch.
        return open_named(
            name,
            table.column_names,
            lambda used: table.select(used).combine_chunks().to_batches(BATCH_ROWS),
            columns,
        )
    if isinstance(rows, np.ndarray):
        fields = [*rows.T]
    else:
        rows = list(rows)
        for at, row in enumerate(rows):
            if len(row) != len(rows[0]):
                raise DataError(
                    f"{name}: triple {at} has {len(row)} fields, and the first one has "
                    f"{len(rows[0])}: {row!r}"
                )
        fields = [*zip(*rows, strict=True)] or [()] * columns.width
    try:
        arrays = [pa.array(field) for field in fields]
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{name}: the fields of a column must have one type: {error}") from None
    first = [str(field[0]) if len(field) else "" for field in fields]
    found = columns.find(name, first, False)
    block = dict(enumerate(arrays)), lambda at: f"{name}: triple {at}"
    return Table(name, columns, found, iter([block] if len(arrays[0]) else []))
