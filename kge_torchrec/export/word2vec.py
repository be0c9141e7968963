"""The entity table as word2vec text: a line "N D", then "label v1 ... vD" for every entity.

Numbers have as many digits as it takes to read the same float32 back.  A label is one word here:
each of its whitespace characters is written as an underscore.

Shapes: N entities, D numbers per entity, m rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from kge_torchrec.data.vocabulary import Vocabulary
from kge_torchrec.export.errors import ExportError
from kge_torchrec.export.labels import text_of, with_newlines

_WHITESPACE = r"[\x09-\x0d\x1c-\x1f\x{85}\pZ]"  # all that str.isspace and str.split know
_LINES = 4096  # at once: text takes several times the room of the numbers


def header(num_entities: int, dim: int) -> bytes:
    return f"{num_entities} {dim}\n".encode()


def body(rows: np.ndarray, labels: pa.Array) -> Iterator[memoryview]:
    """The lines of rows (m, D) float32 and their labels (m,), in blocks."""
    for first in range(0, len(rows), _LINES):
        block = slice(first, first + _LINES)
        words = _words(labels[block]).cast(pa.string())
        numbers = pc.cast(pa.array(rows[block].reshape(-1)), pa.string())
        starts = np.arange(len(words) + 1, dtype=np.int32) * rows.shape[1]
        vectors = pc.binary_join(pa.ListArray.from_arrays(starts, numbers), " ")
        yield text_of(with_newlines(pc.binary_join_element_wise(words, vectors, " ")))


def check(entities: Vocabulary) -> None:
    """Raises ExportError if two labels would become the same word.

    Holds the labels with whitespace in memory meanwhile.
    """
    labels = entities.array
    spaced = labels.filter(pc.match_substring_regex(labels, _WHITESPACE))
    if not len(spaced):
        return
    words = _words(spaced)
    counts = words.value_counts()
    twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    also_labels = labels.filter(pc.is_in(labels, value_set=words))
    for word in pa.chunked_array([twice[:1], also_labels[:1]]).to_pylist():
        one, other, *_ = labels.filter(pc.equal(_words(labels), word)).to_pylist()
        raise ExportError(
            f"the labels {one!r} and {other!r} would both be {word!r} in word2vec text, which has "
            "no whitespace within a label; export to npy or safetensors"
        )


def read(file: Path, num_entities: int, dim: int) -> np.ndarray:
    """The table (N, D) float32 of a file, in memory; labels are not looked at.

    Raises ExportError if the file is no such text.
    """
    columns = [str(d) for d in range(dim)]
    table, filled = np.empty((num_entities, dim), np.float32), 0
    try:
        with file.open("rb") as opened:
            if opened.readline() != header(num_entities, dim):
                raise ExportError(f"{file} does not begin with '{num_entities} {dim}'")
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
    except (pa.ArrowInvalid, ValueError) as error:
        raise ExportError(f"{file} is no word2vec text: {error}") from error
    if filled != num_entities:
        raise ExportError(f"{file} holds {filled:,} vectors instead of {num_entities:,}")
    return table


def _words(labels: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(labels, _WHITESPACE, "_")
