"""Labels: which texts may be one, and files of them.

Shapes: N labels.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data.sort import CHUNK
from kge_torchrec.errors import DataError

LONGEST = 1 << 16  # bytes of a label; a longer one is a damaged file rather than a name


def fault_of(label: str) -> str | None:
    """Return why a text cannot be a label, as a clause; None if it can."""
    if not label:
        return "is empty"
    if label.isspace():
        return f"is white space alone, {label[:20]!r}; name it, or take its triple out"
    if "\0" in label:
        return f"holds a NUL byte: {label[:40]!r}; is the file damaged, or UTF-16?"
    size = len(label.encode())
    if size > LONGEST:
        return (
            f"has {size:,} bytes, and a label at most {LONGEST:,}: {label[:40]!r}...; is a line "
            "end or a delimiter missing?"
        )
    return None


def first_fault(labels: pa.Array) -> str | None:
    """Return ``fault_of`` the first of some texts (N,) that cannot be a label, or None.

    Null counts as empty.  Takes a few nanoseconds per label where all are good.
    """
    lengths = pc.min_max(pc.binary_length(labels)).as_py()
    if not len(labels):
        return None
    if (
        not labels.null_count
        and lengths["min"] > 0
        and lengths["max"] <= LONGEST
        and text_of(labels)[1].all()
        and not pc.any(pc.utf8_is_space(labels)).as_py()
    ):
        return None
    return next(filter(None, (fault_of(label.as_py() or "") for label in labels)))


def check_labels(labels: pa.Array, kind: str) -> None:
    """Raise DataError for a text that cannot be a label of a kind, such as "an entity"."""
    if fault := first_fault(labels):
        raise DataError(f"the label of {kind} {fault}")


def text_of(labels: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return where each label starts and the last one ends, (N + 1,), and the bytes of all."""
    _, offsets, text = labels.buffers()
    starts = np.frombuffer(offsets, np.int64)[labels.offset : labels.offset + len(labels) + 1]
    codes = np.frombuffer(text or b"", np.uint8)
    return starts - starts[0], codes[starts[0] : starts[-1]]


def labels_from(starts: np.ndarray, text: np.ndarray) -> pa.Array:
    """Return labels (N,) in place, from what `text_of` returns; the arrays may be mapped."""
    buffers = [None, pa.py_buffer(starts), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.large_string(), len(starts) - 1, buffers)


def hash_of(label: str) -> int:
    """Return the hash of a label, 64 bits, as ``numbering.hashes`` of many labels."""
    code = 14695981039346656037
    for byte in label.encode():
        code = (code ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
    return (code ^ code >> 32) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


class LabelFiles:
    """Labels that are appended to two files, and read as one mapped array.

    Args:
        path: The files' path without suffix.
    """

    def __init__(self, path: Path):
        self._paths = path.with_suffix(".starts"), path.with_suffix(".text")
        self._files = [path.open("wb") for path in self._paths]
        self._end = 0
        self._files[0].write(np.zeros(1, np.int64).data)

    def add(self, labels: pa.Array) -> None:
        """Append labels (N,)."""
        starts, text = text_of(labels)
        self._files[0].write((starts[1:] + self._end).data)
        self._files[1].write(text.data)
        self._end += int(starts[-1])

    def read(self) -> pa.Array:
        """Close the files and return all labels."""
        for file in self._files:
            file.close()
        text = np.memmap(self._paths[1], np.uint8, "r") if self._end else np.empty(0, np.uint8)
        return labels_from(np.memmap(self._paths[0], np.int64, "r"), text)


def taken(labels: pa.Array, order: np.ndarray, path: Path) -> pa.Array:
    """Return the labels at some places (N,) as a mapped array, whose files have a path."""
    files = LabelFiles(path)
    for start in range(0, len(order), CHUNK):
        files.add(labels.take(pa.array(order[start : start + CHUNK])))
    return files.read()


# Files of labels: one a line, in order of id, UTF-8.  A backslash, a newline and a carriage return
# inside a label are escaped, so that a line is always a label.
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}  # the backslash first
_PLAIN = {written: plain for plain, written in ESCAPES.items()}
_NEWLINE = 10


def read_label_file(file: Path, count: int) -> pa.Array:
    """Return the labels (count,) of a file, in memory, without a Python object for each.

    Args:
        file: One label per line. The last newline may be missing, and lines may end as Windows
            ends them, since other programs write such files too.
        count: The expected number of lines.

    Raises:
        DataError: The file is not such a text, or has another number of lines.
    """
    data = np.fromfile(file, np.uint8)
    if data.size and data[-1] != _NEWLINE:
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
        raise DataError(f"{file} is not valid UTF-8 ({error}); save it as UTF-8") from error
    return _unescaped(pc.replace_substring_regex(lines, r"\r?\n", ""))


def _unescaped(labels: pa.Array) -> pa.Array:
    """Return labels without escapes."""
    escaped = pc.match_substring(labels, "\\")
    plain = [
        re.sub(r"\\[\\nr]", lambda match: _PLAIN[match[0]], label)
        for label in labels.filter(escaped).to_pylist()
    ]
    return pc.replace_with_mask(labels, escaped, pa.array(plain, labels.type)) if plain else labels
