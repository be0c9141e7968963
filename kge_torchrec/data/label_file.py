"""Files of labels: one a line, in order of id, UTF-8.

So that a line is always a label, a backslash, a newline and a carriage return inside of one are
written as a backslash followed by a backslash, an n and an r.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.errors import DataError

ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}  # the backslash first
_PLAIN = {written: plain for plain, written in ESCAPES.items()}
_NEWLINE = 10


WHITESPACE = r"[\x09-\x0d\x1c-\x1f\x{85}\pZ]"  # all that str.isspace and str.split know


def read_label_file(file: Path, count: int, foreign: bool = False) -> pa.Array:
    """The labels (count,) of a file, held in memory, without a Python object for each.

    foreign: by another program, which may leave the last newline out or end lines as Windows does.
    Raises DataError if the file is no such text, or of another number of lines.
    """
    data = np.fromfile(file, np.uint8)
    if foreign and data.size and data[-1] != _NEWLINE:
        data = np.append(data, np.uint8(_NEWLINE))
    ends = np.flatnonzero(data == _NEWLINE) + 1
    if len(ends) != count or data.size != (ends[-1] if count else 0):
        raise DataError(
            f"{file} should hold {count:,} lines, one label each, and has {len(ends):,}"
        )
    offsets = np.concatenate([[0], ends])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    lines = pa.Array.from_buffers(pa.large_string(), count, buffers)
    try:
        lines.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} is not valid UTF-8 ({error})") from error
    pattern = r"\r?\n" if foreign else "\n"
    return _unescaped(pc.replace_substring_regex(lines, pattern, ""))


def _unescaped(labels: pa.Array) -> pa.Array:
    escaped = pc.match_substring(labels, "\\")
    plain = [
        re.sub(r"\\[\\nr]", lambda match: _PLAIN[match[0]], label)
        for label in labels.filter(escaped).to_pylist()
    ]
    return pc.replace_with_mask(labels, escaped, pa.array(plain, labels.type)) if plain else labels
