"""Triples that are already in memory, to record batches."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data.errors import DataError
from kge_torchrec.data.header import COLUMNS

InMemory = pa.Table | np.ndarray | Iterable[tuple[str, str, str]]


def batches_of(split: str, rows: InMemory) -> Iterator[pa.RecordBatch]:
    """Batches of the string columns head, relation, tail; none if there are no rows.

    Raises:
        DataError: naming split and triple: not three fields, or a label that is no string.
    """
    try:
        table = _table(split, rows).cast(pa.schema([(name, pa.large_string()) for name in COLUMNS]))
        table.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{split}: labels must be strings: {error}") from error
    for role in COLUMNS:
        missing = pc.fill_null(pc.equal(pc.binary_length(table[role]), 0), True)
        position = pc.index(missing, True).as_py()
        if position >= 0:
            raise DataError(f"{split}: triple {position}: the {role} is empty")
    yield from table.to_batches()


def _table(split: str, rows: InMemory) -> pa.Table:
    if isinstance(rows, pa.Table):
        columns = rows.columns
    elif isinstance(rows, np.ndarray):
        columns = [pa.array(column) for column in rows.T]
    else:
        rows = list(rows)
        for position, row in enumerate(rows):
            if len(row) != 3:
                raise DataError(f"{split}: triple {position} has {len(row)} fields: {row!r}")
        columns = [pa.array(column, pa.large_string()) for column in zip(*rows, strict=True)]
        columns = columns or [pa.array([], pa.large_string())] * 3
    if len(columns) != 3:
        raise DataError(f"{split}: {len(columns)} columns instead of head, relation, tail")
    return pa.table(list(columns), list(COLUMNS))
