"""Files of vectors that grow chunk by chunk: NumPy's .npy, safetensors and Parquet.

Bytes are appended, not written through a memory map. On a full disk appending raises an error,
while a memory map kills the process.

Shapes: N entities, D elements per row, m rows per chunk.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors import safe_open

from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError

NUMBER = np.dtype("<f4")
Pieces = Iterable[bytes | memoryview]
_TENSOR = "entities"  # the only tensor in a safetensors file
_LABEL, _VECTOR = "label", "vector"  # columns of a Parquet file


class TableFile:
    """The file of an entity table in one format: how to write it in chunks and how to read it."""

    name = ""  # file name

    def __init__(self, num_entities: int, dim: int):
        self.num_entities, self.dim = num_entities, dim

    def begin(self) -> Pieces:
        """Return the bytes before the first row."""
        return []

    def rows(self, rows: np.ndarray, labels: pa.Array) -> Pieces:
        """Return the bytes of the next chunk: rows (m, D) float32 and labels (m,)."""
        return [np.ascontiguousarray(rows, NUMBER).data]

    def end(self) -> Pieces:
        """Return the bytes after the last row."""
        return []

    def read(self, file: Path) -> np.ndarray:
        """Return the table (N, D), memory-mapped where the format allows it.

        Raises an error of the library that reads the format, or ExportError.
        """
        raise NotImplementedError

    @staticmethod
    def check(entities: Vocabulary) -> None:
        """Raise ExportError for labels that the format cannot hold."""


class Npy(TableFile):
    """A NumPy array."""

    name = "entities.npy"

    def begin(self) -> Pieces:
        out = io.BytesIO()
        shape = self.num_entities, self.dim
        fields = {"descr": NUMBER.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(out, fields)
        return [out.getvalue()]

    def read(self, file: Path) -> np.ndarray:
        return np.load(file, mmap_mode="r")


class Safetensors(TableFile):
    """A safetensors file with one tensor."""

    name = "entities.safetensors"

    def begin(self) -> Pieces:
        """Return the header: eight bytes of length, then JSON, padded to align the values."""
        size = self.num_entities * self.dim * NUMBER.itemsize
        shape = [self.num_entities, self.dim]
        tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
        text = json.dumps({_TENSOR: tensor}).encode()
        text += b" " * (-len(text) % 8)
        return [struct.pack("<Q", len(text)) + text]

    def read(self, file: Path) -> np.ndarray:
        with safe_open(file, "numpy") as opened:
            names = list(opened.keys())
            if names != [_TENSOR]:
                raise ExportError(f"{file} holds {', '.join(names)} instead of {_TENSOR} alone")
            tensor = opened.get_slice(_TENSOR)
            shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
        if kind != "F32":
            raise ExportError(f"{file} holds numbers of type {kind} instead of F32")
        # safe_open has checked that the only tensor ends where the file ends.
        start = file.stat().st_size - int(np.prod(shape)) * NUMBER.itemsize
        return np.memmap(file, NUMBER, "r", start, shape)


class Parquet(TableFile):
    """A Parquet file, which data frames and databases read, with one row group per chunk.

    Its columns are ``label`` (text), ``vector`` (a list of D float32), and one vector column per
    name in ``more``.
    """

    name = "entities.parquet"

    def __init__(self, num_entities: int, dim: int, more: Iterable[str] = ()):
        super().__init__(num_entities, dim)
        self._names, vector = (_VECTOR, *more), pa.list_(pa.float32(), dim)
        columns = [(name, vector) for name in self._names]
        self._schema = pa.schema([(_LABEL, pa.large_string()), *columns])
        self._buffer = io.BytesIO()

    def begin(self) -> Pieces:
        import pyarrow.parquet as pq  # starts threads

        # Trained vectors do not compress, so only labels are compressed.
        self._writer = pq.ParquetWriter(
            self._buffer,
            self._schema,
            compression={_LABEL: "zstd", **{f"{x}.list.element": "none" for x in self._names}},
            use_dictionary=False,
        )
        return self._drained()

    def rows(self, rows: np.ndarray, labels: pa.Array, *more: np.ndarray) -> Pieces:
        flat = [np.ascontiguousarray(x, np.float32).ravel() for x in (rows, *more)]
        vectors = [pa.FixedSizeListArray.from_arrays(x, self.dim) for x in flat]
        self._writer.write_table(pa.table([labels.cast(pa.large_string()), *vectors], self._schema))
        return self._drained()

    def end(self) -> Pieces:
        self._writer.close()
        return self._drained()

    def _drained(self) -> list[bytes]:
        written = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return [written]

    def read(self, file: Path) -> np.ndarray:
        import pyarrow.parquet as pq

        table, filled = np.empty((self.num_entities, self.dim), np.float32), 0
        with pq.ParquetFile(file) as opened:
            kind, count = opened.schema_arrow.field(_VECTOR).type, opened.metadata.num_rows
            if kind != self._schema.field(_VECTOR).type or count != self.num_entities:
                raise ExportError(
                    f"{file} holds {count:,} vectors of type {kind} instead of shape "
                    f"({self.num_entities}, {self.dim}), float32"
                )
            for batch in opened.iter_batches(columns=[_VECTOR]):
                rows = batch.column(_VECTOR).flatten().to_numpy().reshape(-1, self.dim)
                table[filled : filled + len(rows)] = rows
                filled += len(rows)
        return table


def npy_file(table: np.ndarray) -> Pieces:
    """Return the bytes of a small .npy file with values (n, m)."""
    file = Npy(*table.shape)
    return [*file.begin(), np.ascontiguousarray(table, NUMBER).data]


def parquet_file(labels: pa.Array, vectors: Mapping[str, np.ndarray]) -> Pieces:
    """Return the bytes of a small Parquet file.

    Args:
        labels: (n,) labels.
        vectors: Columns (n, D) by name. The first must be ``vector``.
    """
    first, *more = vectors.values()
    file = Parquet(len(first), first.shape[1], list(vectors)[1:])
    return [*file.begin(), *file.rows(first, labels, *more), *file.end()]
