"""Labels: which texts may be one, and files of them.

Shapes: N labels.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import DTypeLike

from kge_torchrec.data.sort import CHUNK

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


def faulty(labels: pa.Array) -> pa.Array:
    """Return which texts (N,) cannot be a label, booleans; see `fault_of`."""
    size = pc.binary_length(labels)
    bad = pc.or_(pc.equal(size, 0), pc.greater(size, LONGEST))
    bad = pc.or_(bad, pc.utf8_is_space(labels))
    if len(labels) and not text_of(labels)[1].all():
        bad = pc.or_(bad, pc.match_substring(labels, "\0"))
    return bad


def text_of(labels: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return where each label starts and the last one ends, (N + 1,), and the bytes of all."""
    _, offsets, text = labels.buffers()
    starts = np.frombuffer(offsets, np.int64)[labels.offset : labels.offset + len(labels) + 1]
    codes = np.frombuffer(text or b"", np.uint8)
    return starts - starts[0], codes[starts[0] : starts[-1]]


def hash_of(label: str) -> int:
    """Return the hash of a label, 64 bits, as ``numbering.hashes`` of many labels."""
    code = 14695981039346656037
    for byte in label.encode():
        code = (code ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
    return (code ^ code >> 32) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


class AppendedLabels:
    """Labels that are appended to two open files, and read as one mapped array."""

    def __init__(self, starts: IO[bytes], text: IO[bytes]):
        self._starts, self._text, self._end, self._count = starts, text, 0, 0
        starts.write(np.zeros(1, np.int64).data)

    def add(self, labels: pa.Array) -> int:
        """Append labels (N,); return how many there were before."""
        starts, text = text_of(labels)
        self._starts.write((starts[1:] + self._end).data)
        self._text.write(text.data)
        self._end += int(starts[-1])
        self._count += len(labels)
        return self._count - len(labels)

    def read(self) -> pa.Array:
        """Return all labels; the files may be closed then."""
        arrays = mapped(self._starts, np.int64), mapped(self._text, np.uint8)
        buffers = [None, *map(pa.py_buffer, arrays)]
        return pa.Array.from_buffers(pa.large_string(), self._count, buffers)


def mapped(file: IO[bytes], dtype: DTypeLike) -> np.ndarray:
    """Return what was written to a file, mapped and writable; an empty file cannot be mapped."""
    file.flush()
    return np.memmap(file, dtype, "r+") if file.tell() else np.empty(0, dtype)


def taken(labels: pa.Array, order: np.ndarray, folder: Path) -> pa.Array:
    """Return the labels at some places (N,) as a mapped array, with files in a folder."""
    with TemporaryFile(dir=folder) as starts, TemporaryFile(dir=folder) as text:
        own = AppendedLabels(starts, text)
        for start in range(0, len(order), CHUNK):
            own.add(labels.take(pa.array(order[start : start + CHUNK])))
        return own.read()
