"""The files of an export: labels, and the entity table in each format, written chunk by chunk.

Bytes are appended, not written through a memory map. On a full disk appending raises an error,
while a memory map kills the process.

A label file has one label per line (``label_file``). word2vec text has enough digits to read the
same float32 back. In word2vec text a label is one word: each whitespace character of a label is
written as an underscore.

Shapes: N entities, D elements per row, m rows per chunk.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from safetensors import SafetensorError, safe_open

from kge_torchrec.data.labels import ESCAPES, WHITESPACE, read_label_file, text_of
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import DataError, ExportError

NUMBER = np.dtype("<f4")
Pieces = Iterable[bytes | memoryview]
_TENSOR = "entities"  # the only tensor in a safetensors file
_LABEL, _VECTOR = "label", "vector"  # columns of a Parquet file
BLOCK = 1 << 16  # labels per block
_LINES = 4096  # lines per block: text takes several times the memory of float32


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
                raise ExportError(f"{file} holds {', '.join(names)} instead of only {_TENSOR}")
            tensor = opened.get_slice(_TENSOR)
            shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
        if kind != "F32":
            raise ExportError(f"{file} holds values of type {kind} instead of F32")
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


class Word2vec(TableFile):
    """word2vec text: a line "N D", then a line "label v1 ... vD" per entity."""

    name = "entities.vec"

    def begin(self) -> Pieces:
        return [f"{self.num_entities} {self.dim}\n".encode()]

    def rows(self, rows: np.ndarray, labels: pa.Array) -> Pieces:
        for first in range(0, len(rows), _LINES):
            block = slice(first, first + _LINES)
            words = _words(labels[block]).cast(pa.string())
            numbers = pc.cast(pa.array(rows[block].reshape(-1)), pa.string())
            starts = np.arange(len(words) + 1, dtype=np.int32) * self.dim
            vectors = pc.binary_join(pa.ListArray.from_arrays(starts, numbers), " ")
            yield _as_lines(pc.binary_join_element_wise(words, vectors, " "))

    def read(self, file: Path) -> np.ndarray:
        """Return the table (N, D) float32, in memory. Labels are ignored."""
        columns = [str(d) for d in range(self.dim)]
        table, filled = np.empty((self.num_entities, self.dim), np.float32), 0
        with file.open("rb") as opened:
            if [opened.readline()] != self.begin():
                begin = f"{self.num_entities} {self.dim}"
                raise ExportError(f"{file} does not begin with '{begin}'")
        for batch in csv.open_csv(
            file,
            csv.ReadOptions(skip_rows=1, column_names=["label", *columns]),
            csv.ParseOptions(delimiter=" ", quote_char=False),
            csv.ConvertOptions(
                include_columns=columns,
                column_types=dict.fromkeys(columns, pa.float32()),
                null_values=[],
            ),
        ):
            for column, numbers in enumerate(batch.columns):
                table[filled : filled + len(numbers), column] = numbers
            filled += batch.num_rows
        if filled != self.num_entities:
            raise ExportError(f"{file} holds {filled:,} vectors instead of {self.num_entities:,}")
        return table

    @staticmethod
    def check(entities: Vocabulary) -> None:
        """Raise ExportError if two labels would become the same word.

        Holds the labels that contain whitespace in memory meanwhile.
        """
        labels = entities.array
        spaced = labels.filter(pc.match_substring_regex(labels, WHITESPACE))
        if not len(spaced):
            return
        words = _words(spaced)
        counts = words.value_counts()
        twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        also_labels = labels.filter(pc.is_in(labels, value_set=words))
        for word in pa.chunked_array([twice[:1], also_labels[:1]]).to_pylist():
            first, second, *_ = labels.filter(pc.equal(_words(labels), word)).to_pylist()
            raise ExportError(
                f"the labels {first!r} and {second!r} would both be {word!r} in word2vec text, "
                "which has no whitespace within a label; export to npy or safetensors"
            )


def _words(labels: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(labels, WHITESPACE, "_")


FORMATS: dict[str, type[TableFile]] = {
    "npy": Npy,
    "safetensors": Safetensors,
    "word2vec": Word2vec,
    "parquet": Parquet,
}
_UNREADABLE = (ValueError, EOFError, KeyError, OSError, SafetensorError, pa.ArrowException)


def open_table(file: Path, table_format: str, num_entities: int, dim: int) -> np.ndarray:
    """Return the table (N, D) float32 of a file, read-only and memory-mapped if possible.

    Raises:
        ExportError: The file does not hold such a table.
    """
    try:
        table = FORMATS[table_format](num_entities, dim).read(file)
    except _UNREADABLE as error:
        raise ExportError(f"{file} is not a readable {table_format} file: {error}") from error
    if table.shape != (num_entities, dim) or table.dtype != NUMBER:
        raise ExportError(
            f"{file} holds {table.dtype} values of shape {tuple(table.shape)} instead of "
            f"float32 ({num_entities}, {dim})"
        )
    table.flags.writeable = False
    return table


def npy_file(table: np.ndarray) -> Pieces:
    """Return the bytes of a small .npy file with values (n, m)."""
    file = Npy(*table.shape)
    return [*file.begin(), np.ascontiguousarray(table, NUMBER).data]


def parquet_file(labels: pa.Array, vectors: Mapping[str, np.ndarray]) -> Pieces:
    """Return the bytes of a small Parquet file of labels (n,) and columns (n, D) by name.

    The first column must be ``vector``.
    """
    first, *more = vectors.values()
    file = Parquet(len(first), first.shape[1], list(vectors)[1:])
    return [*file.begin(), *file.rows(first, labels, *more), *file.end()]


def label_lines(vocabulary: Vocabulary) -> Iterator[memoryview]:
    """Yield the text of a label file, in blocks."""
    for first in range(0, len(vocabulary), BLOCK):
        labels = vocabulary.array[first : first + BLOCK]
        for plain, written in ESCAPES.items():
            labels = pc.replace_substring(labels, plain, written)
        yield _as_lines(labels)


def _as_lines(strings: pa.Array) -> memoryview:
    """Return the text of strings (n,), each with a newline at its end."""
    nothing, newline = (pa.scalar(text, strings.type) for text in ("", "\n"))
    lines = pc.binary_join_element_wise(strings, nothing, newline)
    return text_of(lines.cast(pa.large_string()))[1].data


def read_labels(file: Path, kind: str, count: int) -> Vocabulary:
    """Read the ``count`` labels of a file that ``label_lines`` wrote into memory.

    Raises:
        ExportError: The file is not such a text.
    """
    try:
        return Vocabulary(read_label_file(file, count), kind)
    except DataError as error:
        raise ExportError(f"{error}; export again") from error
