"""Vectors with their labels as Parquet, which data frames and databases read.

Columns: ``label`` (text) and ``vector`` (a list of D float32, always D).

Shapes: N rows of a file, D numbers a row, m rows of a chunk.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from kge_torchrec.errors import ExportError

Pieces = Iterable[bytes | memoryview]
LABEL, VECTOR = "label", "vector"


class VectorColumns:
    """A Parquet file, a row group a chunk, as the bytes that each step adds to it."""

    def __init__(self, num_rows: int, dim: int, *more: str):
        """more: the names of columns of vectors after ``vector``."""
        import pyarrow.parquet as pq  # starts threads

        self._dim, self._names = dim, (VECTOR, *more)
        self._schema = pa.schema(
            [(LABEL, pa.large_string())]
            + [(name, pa.list_(pa.float32(), dim)) for name in self._names]
        )
        self._buffer = _Drained()
        # Numbers of trained vectors do not compress: only labels are.
        self._writer = pq.ParquetWriter(
            self._buffer,
            self._schema,
            compression={LABEL: "zstd", **{f"{name}.list.element": "none" for name in self._names}},
            use_dictionary=False,
        )

    def begin(self) -> Pieces:
        return self._buffer.drained()

    def rows(self, rows: np.ndarray, labels: pa.Array, *more: np.ndarray) -> Pieces:
        """The next chunk: (m, D) of ``vector``, then of each column more; labels (m,)."""
        vectors = [
            pa.FixedSizeListArray.from_arrays(
                np.ascontiguousarray(x, np.float32).ravel(), self._dim
            )
            for x in (rows, *more)
        ]
        columns = [labels.cast(pa.large_string()), *vectors]
        self._writer.write_table(pa.table(columns, self._schema))
        return self._buffer.drained()

    def end(self) -> Pieces:
        self._writer.close()
        return self._buffer.drained()


def vectors_file(labels: pa.Array, vectors: Mapping[str, np.ndarray]) -> Pieces:
    """A whole small file: the named columns of vectors, (m, D) each, the first named ``vector``."""
    first, *more = vectors.values()
    columns = VectorColumns(len(first), first.shape[1], *list(vectors)[1:])
    yield from columns.begin()
    yield from columns.rows(first, labels, *more)
    yield from columns.end()


def read(file: Path, num_entities: int, dim: int) -> np.ndarray:
    """The vectors (N, D) float32 of a file, in memory; labels are not looked at.

    Raises ExportError if it is no such file.
    """
    import pyarrow.parquet as pq  # starts threads

    table, filled = np.empty((num_entities, dim), np.float32), 0
    try:
        with pq.ParquetFile(file) as opened:
            kind = opened.schema_arrow.field(VECTOR).type
            if kind != pa.list_(pa.float32(), dim) or opened.metadata.num_rows != num_entities:
                raise ExportError(
                    f"{file} holds {opened.metadata.num_rows:,} vectors of type {kind} instead of "
                    f"shape ({num_entities}, {dim}), float32"
                )
            for batch in opened.iter_batches(columns=[VECTOR]):
                rows = batch.column(VECTOR).flatten().to_numpy().reshape(-1, dim)
                table[filled : filled + len(rows)] = rows
                filled += len(rows)
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        raise ExportError(f"{file} is no readable Parquet file of vectors: {error}") from error
    return table


class _Drained(io.RawIOBase):
    """A file that gives away what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self._pieces.append(bytes(data))  # type: ignore[call-overload]  # any buffer
        return len(self._pieces[-1])

    def drained(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces
