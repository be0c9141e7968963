"""The file formats of the entity table, each as bytes that grow chunk by chunk.

Plain appending instead of writing through a memory map: on a full disk the one is an error, the
other kills the process.

Shapes: N entities, D numbers per entity, m rows of a chunk.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError, safe_open

from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError
from kge_torchrec.export import columns
from kge_torchrec.export import text as word2vec
from kge_torchrec.export.columns import Pieces

NUMBER = np.dtype("<f4")
_TENSOR = "entities"  # the only one in a safetensors file


def _nothing_to_check(entities: Vocabulary) -> None:
    pass


class Encoder(Protocol):
    """A table on its way into a file."""

    def begin(self) -> Pieces: ...

    def rows(self, rows: np.ndarray, labels: pa.Array) -> Pieces:
        """Of the next chunk, (m, D) and (m,)."""

    def end(self) -> Pieces: ...


@dataclass(frozen=True)
class Appended:
    """A header, then the rows."""

    header: Callable[[int, int], bytes]  # of N and D
    body: Callable[[np.ndarray, pa.Array], Iterable[memoryview]]  # of rows (m, D) and labels (m,)
    num_entities: int
    dim: int

    def begin(self) -> Pieces:
        return [self.header(self.num_entities, self.dim)]

    def rows(self, rows: np.ndarray, labels: pa.Array) -> Pieces:
        return self.body(rows, labels)

    def end(self) -> Pieces:
        return []


@dataclass(frozen=True)
class TableFormat:
    """How the table is written and read back."""

    file: str
    encoder: Callable[[int, int], Encoder]  # of N and D
    read: Callable[[Path, int, int], np.ndarray]  # of the file, N and D: (N, D), mapped if it can
    check: Callable[[Vocabulary], None] = _nothing_to_check  # of the entities, before it is written


def open_table(file: Path, table_format: str, num_entities: int, dim: int) -> np.ndarray:
    """The table (N, D) float32, read-only: memory-mapped, but word2vec text read into memory.

    Raises ExportError unless the file is such a table.
    """
    table = FORMATS[table_format].read(file, num_entities, dim)
    if table.shape != (num_entities, dim) or table.dtype != NUMBER:
        raise ExportError(
            f"{file} holds {table.dtype} numbers of shape {tuple(table.shape)} instead of "
            f"float32 ({num_entities}, {dim})"
        )
    table.flags.writeable = False
    return table


def _raw(rows: np.ndarray, labels: pa.Array | None = None) -> Iterable[memoryview]:
    yield np.ascontiguousarray(rows, NUMBER).data


def npy_file(table: np.ndarray) -> Pieces:
    """A whole small .npy file of numbers (n, m)."""
    yield _npy_header(*table.shape)
    yield from _raw(table)


def _npy_header(num_entities: int, dim: int) -> bytes:
    out = io.BytesIO()
    fields = {"descr": NUMBER.str, "fortran_order": False, "shape": (num_entities, dim)}
    np.lib.format.write_array_header_1_0(out, fields)
    return out.getvalue()


def _read_npy(file: Path, num_entities: int, dim: int) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ExportError(f"{file} is no readable .npy file: {error}") from error


def _safetensors_header(num_entities: int, dim: int) -> bytes:
    """Eight bytes of length, then JSON, filled up with spaces so that the numbers are aligned."""
    size = num_entities * dim * NUMBER.itemsize
    tensor = {"dtype": "F32", "shape": [num_entities, dim], "data_offsets": [0, size]}
    text = json.dumps({_TENSOR: tensor}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_safetensors(file: Path, num_entities: int, dim: int) -> np.ndarray:
    try:
        with safe_open(file, "numpy") as opened:
            names, tensor = list(opened.keys()), None
            if names == [_TENSOR]:
                tensor = opened.get_slice(_TENSOR)
                shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
    except SafetensorError as error:
        raise ExportError(f"{file} is no readable safetensors file: {error}") from error
    if tensor is None:
        raise ExportError(f"{file} holds {', '.join(names)} instead of {_TENSOR} alone")
    if kind != "F32":
        raise ExportError(f"{file} holds numbers of type {kind} instead of F32")
    # The only tensor ends where the file ends: safe_open has seen to that.
    start = file.stat().st_size - int(np.prod(shape)) * NUMBER.itemsize
    return np.memmap(file, NUMBER, "r", start, shape)


FORMATS = {
    "npy": TableFormat("entities.npy", partial(Appended, _npy_header, _raw), _read_npy),
    "safetensors": TableFormat(
        "entities.safetensors", partial(Appended, _safetensors_header, _raw), _read_safetensors
    ),
    "word2vec": TableFormat(
        "entities.vec",
        partial(Appended, word2vec.header, word2vec.body),
        word2vec.read,
        word2vec.check,
    ),
    "parquet": TableFormat("entities.parquet", columns.VectorColumns, columns.read),
}
