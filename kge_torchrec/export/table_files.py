"""The files of an export: labels, and the entity table as safetensors or Parquet.

Both are written chunk by chunk. Bytes are written to a file, not through a memory map. On a full
disk writing raises an error, while a memory map kills the process.

Shapes: N entities, D elements per row, m rows per chunk.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from safetensors import SafetensorError, safe_open

from kge_torchrec.data.labels import text_of
from kge_torchrec.data.store import TripleStore, Vocabulary
from kge_torchrec.errors import ExportError

NUMBER = np.dtype("<f4")
_TENSOR = "entities"  # the only tensor in a safetensors file
BLOCK = 1 << 16  # labels per block
# Inside a label, so that a line is always a label; the backslash first.
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}


class Safetensors:
    """A safetensors file with one tensor (N, D), written in chunks."""

    name = "entities.safetensors"

    def __init__(self, folder: Path, num_entities: int, dim: int):
        size = num_entities * dim * NUMBER.itemsize
        tensor = {"dtype": "F32", "shape": [num_entities, dim], "data_offsets": [0, size]}
        text = json.dumps({_TENSOR: tensor}).encode()
        text += b" " * (-len(text) % 8)  # aligns the values
        self._file: IO[bytes] = (folder / self.name).open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def append(self, first: int, rows: np.ndarray) -> None:
        """Write the next chunk (m, D) float32, whose first row has the id ``first``."""
        self._file.write(np.ascontiguousarray(rows, NUMBER).data)

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


class Parquet:
    """A Parquet file with one row group per chunk.

    Its columns are ``id``, ``label``, ``type`` (of a graph with types: one text, or a list if an
    entity may have several) and ``vector`` (a list of D float32).
    """

    name = "entities.parquet"

    def __init__(self, folder: Path, store: TripleStore, dim: int):
        import pyarrow.parquet as pq  # starts threads

        self._labels, self._dim = store.entities.array, dim
        self._types = store.types()
        self._has_one_type = store.size.typed
        kind = pa.large_string() if self._has_one_type else pa.list_(pa.large_string())
        types = [] if self._types is None else [("type", kind)]
        vector = ("vector", pa.list_(pa.float32(), dim))
        text = pa.large_string()
        self._schema = pa.schema([("id", pa.int64()), ("label", text), *types, vector])
        # Trained vectors do not compress, so only the other columns are compressed.
        codecs = dict.fromkeys(("id", "label", "type", "type.list.element"), "zstd")
        codecs["vector.list.element"] = "none"
        self._writer = pq.ParquetWriter(
            folder / self.name, self._schema, compression=codecs, use_dictionary=False
        )

    def append(self, first: int, rows: np.ndarray) -> None:
        """Write the next chunk (m, D) float32, whose first row has the id ``first``."""
        ids = np.arange(first, first + len(rows))
        columns = [pa.array(ids), self._labels[first : first + len(rows)].cast(pa.large_string())]
        if self._types is not None:
            which, types = self._types.of(ids)
            names = self._types.names.take(pa.array(types)).cast(pa.large_string())
            starts = np.searchsorted(which, np.arange(len(rows) + 1))
            lists = pa.ListArray.from_arrays(pa.array(starts, pa.int32()), names)
            columns.append(names if self._has_one_type else lists)
        self._writer.write_table(pa.table([*columns, lists_of(rows)], self._schema))

    def close(self) -> None:
        """Complete the file."""
        self._writer.close()


def lists_of(vectors: np.ndarray) -> pa.Array:
    """Return vectors (n, D) as an Arrow column of lists of float32."""
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


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


def write_labels(file: Path, vocabulary: Vocabulary) -> None:
    """Write one label per line, in order of id, for other programs."""
    with file.open("wb") as out:
        for first in range(0, len(vocabulary), BLOCK):
            labels = vocabulary.array[first : first + BLOCK]
            for plain, written in ESCAPES.items():
                labels = pc.replace_substring(labels, plain, written)
            nothing, newline = (pa.scalar(text, labels.type) for text in ("", "\n"))
            lines = pc.binary_join_element_wise(labels, nothing, newline)
            out.write(text_of(lines.cast(pa.large_string()))[1].data)
