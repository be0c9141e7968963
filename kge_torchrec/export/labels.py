"""Labels as plain text: one a line, in order of id, UTF-8.

So that a line is always a label, a backslash, a newline and a carriage return inside of one are
written as a backslash followed by a backslash, an n and an r.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data.vocabulary import Vocabulary
from kge_torchrec.export.errors import ExportError

BLOCK = 1 << 16  # labels
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}  # the backslash first
_PLAIN = {written: plain for plain, written in _ESCAPES.items()}
_NEWLINE = 10


def label_lines(vocabulary: Vocabulary) -> Iterator[memoryview]:
    """The text of a label file, in blocks."""
    for first in range(0, len(vocabulary), BLOCK):
        labels = vocabulary.array[first : first + BLOCK]
        for plain, written in _ESCAPES.items():
            labels = pc.replace_substring(labels, plain, written)
        yield text_of(with_newlines(labels))


def with_newlines(strings: pa.Array) -> pa.Array:
    """Every string with a newline at its end."""
    nothing, newline = (pa.scalar(text, strings.type) for text in ("", "\n"))
    return pc.binary_join_element_wise(strings, nothing, newline)


def text_of(strings: pa.Array) -> memoryview:
    """All strings one after another, UTF-8, not copied."""
    width = np.int64 if pa.types.is_large_string(strings.type) else np.int32
    offsets = np.frombuffer(strings.buffers()[1], width)
    start, stop = offsets[strings.offset], offsets[strings.offset + len(strings)]
    return memoryview(strings.buffers()[2] or b"")[start:stop]


def read_labels(file: Path, kind: str, count: int) -> Vocabulary:
    """The labels of a file that ``label_lines`` wrote, held in memory; N of them are expected.

    kind: "entity" or "relation", for messages.  Raises ExportError if the file is no such text.
    """
    data = np.fromfile(file, np.uint8)
    ends = np.flatnonzero(data == _NEWLINE) + 1
    if len(ends) != count or data.size != (ends[-1] if count else 0):
        raise ExportError(f"{file} should hold {count:,} lines, one label each; export again")
    offsets = np.concatenate([[0], ends])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    lines = pa.Array.from_buffers(pa.large_string(), count, buffers)
    try:
        lines.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ExportError(f"{file} is not valid UTF-8 ({error}); export again") from error
    return Vocabulary(_unescaped(pc.replace_substring(lines, "\n", "")), kind)


def _unescaped(labels: pa.Array) -> pa.Array:
    escaped = pc.match_substring(labels, "\\")
    plain = [
        re.sub(r"\\[\\nr]", lambda match: _PLAIN[match[0]], label)
        for label in labels.filter(escaped).to_pylist()
    ]
    return pc.replace_with_mask(labels, escaped, pa.array(plain, labels.type)) if plain else labels
