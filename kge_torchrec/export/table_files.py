"""The files of an export: labels, and the entity table as safetensors or Parquet.

Both are written chunk by chunk. Bytes are appended, not written through a memory map. On a full
disk appending raises an error, while a memory map kills the process.

A label file has one label per line (``label_lines``).

Shapes: N entities, D elements per row, m rows per chunk.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from safetensors import SafetensorError, safe_open

from kge_torchrec.data.labels import ESCAPES, read_label_file, text_of
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import DataError, ExportError

NUMBER = np.dtype("<f4")
Pieces = Iterable[bytes | memoryview]
_TENSOR = "entities"  # the only tensor in a safetensors file
BLOCK = 1 << 16  # labels per block


class TableFile:
    """The file of an entity table in one format, written in chunks."""

    name = ""  # file name

    def __init__(self, num_entities: int, dim: int):
        self.num_entities, self.dim = num_entities, dim

    def begin(self) -> Pieces:
        """Return the bytes before the first row."""
        raise NotImplementedError

    def rows(self, rows: np.ndarray, labels: pa.Array) -> Pieces:
        """Return the bytes of the next chunk: rows (m, D) float32 and labels (m,)."""
        raise NotImplementedError

    def end(self) -> Pieces:
        """Return the bytes after the last row."""
        return []


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

    def rows(self, rows: np.ndarray, labels: pa.Array) -> Pieces:
        return [np.ascontiguousarray(rows, NUMBER).data]


class Parquet(TableFile):
    """A Parquet file with one row group per chunk.

    Its columns are ``label`` (text) and ``vector`` (a list of D float32).
    """

    name = "entities.parquet"

    def __init__(self, num_entities: int, dim: int):
        super().__init__(num_entities, dim)
        vector = pa.list_(pa.float32(), dim)
        self._schema = pa.schema([("label", pa.large_string()), ("vector", vector)])
        self._buffer = io.BytesIO()

    def begin(self) -> Pieces:
        import pyarrow.parquet as pq  # starts threads

        # Trained vectors do not compress, so only labels are compressed.
        compression = {"label": "zstd", "vector.list.element": "none"}
        self._writer = pq.ParquetWriter(
            self._buffer, self._schema, compression=compression, use_dictionary=False
        )
        return self._drained()

    def rows(self, rows: np.ndarray, labels: pa.Array) -> Pieces:
        flat = pa.array(np.ascontiguousarray(rows, np.float32).ravel())
        vectors = pa.FixedSizeListArray.from_arrays(flat, self.dim)
        self._writer.write_table(pa.table([labels.cast(pa.large_string()), vectors], self._schema))
        return self._drained()

    def end(self) -> Pieces:
        self._writer.close()
        return self._drained()

    def _drained(self) -> list[bytes]:
        written = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return [written]


TABLES: dict[str, type[TableFile]] = {"safetensors": Safetensors, "parquet": Parquet}


def open_table(file: Path, num_entities: int, dim: int) -> np.ndarray:
    """Return the table (N, D) float32 of a safetensors file, read-only and memory-mapped.

    Raises:
        ExportError: The file does not hold such a table, or holds more.
    """
    try:
        with safe_open(file, "numpy") as opened:
            names = list(opened.keys())
            if names != [_TENSOR]:
                raise ExportError(f"{file} holds {', '.join(names)} instead of only {_TENSOR}")
            tensor = opened.get_slice(_TENSOR)
            shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{file} is not a readable safetensors file: {error}") from error
    if shape != (num_entities, dim) or kind != "F32":
        raise ExportError(
            f"{file} holds {kind} values of shape {shape} instead of F32 ({num_entities}, {dim})"
        )
    # safe_open has checked that the only tensor ends where the file ends.
    start = file.stat().st_size - num_entities * dim * NUMBER.itemsize
    return np.memmap(file, NUMBER, "r", start, shape)


def parquet_file(labels: pa.Array, vectors: np.ndarray) -> Pieces:
    """Return the bytes of a small Parquet file of labels (n,) and vectors (n, D)."""
    file = Parquet(*vectors.shape)
    return [*file.begin(), *file.rows(vectors, labels), *file.end()]


def label_lines(vocabulary: Vocabulary) -> Iterator[memoryview]:
    """Yield the text of a label file, in blocks."""
    for first in range(0, len(vocabulary), BLOCK):
        labels = vocabulary.array[first : first + BLOCK]
        for plain, written in ESCAPES.items():
            labels = pc.replace_substring(labels, plain, written)
        nothing, newline = (pa.scalar(text, labels.type) for text in ("", "\n"))
        lines = pc.binary_join_element_wise(labels, nothing, newline)
        yield text_of(lines.cast(pa.large_string()))[1].data


def read_labels(file: Path, kind: str, count: int) -> Vocabulary:
    """Read the ``count`` labels of a file that ``label_lines`` wrote into memory.

    Raises:
        ExportError: The file is not such a text.
    """
    try:
        return Vocabulary(read_label_file(file, count), kind)
    except DataError as error:
        raise ExportError(f"{error}; export again") from error
