"""The text files of an export: labels, and the entity table as word2vec text.

A label file has one label per line (``label_file``). word2vec text has enough digits to read the
same float32 back. In word2vec text a label is one word: each whitespace character of a label is
written as an underscore.

Shapes: N entities, D elements per row, m rows per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from kge_torchrec.data.labels import ESCAPES, WHITESPACE, read_label_file
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import DataError, ExportError
from kge_torchrec.export.table_files import Pieces, TableFile

BLOCK = 1 << 16  # labels per block


def label_lines(vocabulary: Vocabulary) -> Iterator[memoryview]:
    """Yield the text of a label file, in blocks."""
    for first in range(0, len(vocabulary), BLOCK):
        labels = vocabulary.array[first : first + BLOCK]
        for plain, written in ESCAPES.items():
            labels = pc.replace_substring(labels, plain, written)
        yield text_of(with_newlines(labels))


def with_newlines(strings: pa.Array) -> pa.Array:
    """Return every string with a newline at its end."""
    nothing, newline = (pa.scalar(text, strings.type) for text in ("", "\n"))
    return pc.binary_join_element_wise(strings, nothing, newline)


def text_of(strings: pa.Array) -> memoryview:
    """Return all strings one after another as UTF-8, without a copy."""
    width = np.int64 if pa.types.is_large_string(strings.type) else np.int32
    offsets = np.frombuffer(strings.buffers()[1], width)
    start, stop = offsets[strings.offset], offsets[strings.offset + len(strings)]
    return memoryview(strings.buffers()[2] or b"")[start:stop]


def read_labels(file: Path, kind: str, count: int) -> Vocabulary:
    """Read the labels of a file that ``label_lines`` wrote into memory.

    Args:
        file: The file.
        kind: "entity" or "relation", for messages.
        count: The number of labels that the file should have.

    Raises:
        ExportError: The file is not such a text.
    """
    try:
        return Vocabulary(read_label_file(file, count), kind)
    except DataError as error:
        raise ExportError(f"{error}; export again") from error


_LINES = 4096  # lines per block: text takes several times the memory of float32


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
            yield text_of(with_newlines(pc.binary_join_element_wise(words, vectors, " ")))

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
            one, other, *_ = labels.filter(pc.equal(_words(labels), word)).to_pylist()
            raise ExportError(
                f"the labels {one!r} and {other!r} would both be {word!r} in word2vec text, which "
                "has no whitespace within a label; export to npy or safetensors"
            )


def _words(labels: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(labels, WHITESPACE, "_")
