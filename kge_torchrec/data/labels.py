"""Which texts may be labels, and which labels are easily mistaken for each other.

Shapes: N labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

LONGEST = 1 << 16  # bytes of a label; a longer one is a damaged file rather than a name
EXAMPLES = 3


def fault_of(label: str) -> str | None:
    """Why this cannot be a label, as a clause; None if it can."""
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


def first_fault(labels: pa.Array) -> int | None:
    """The position of the first of these (N,) large_strings that cannot be a label.

    A few nanoseconds a label where there is none.  Null counts as empty.
    """
    lengths = pc.min_max(pc.binary_length(labels)).as_py()
    if not len(labels):
        return None
    if (
        not labels.null_count
        and lengths["min"] > 0
        and lengths["max"] <= LONGEST
        and _text(labels)[1].all()
        and not pc.any(pc.utf8_is_space(labels)).as_py()
    ):
        return None
    return next(i for i, label in enumerate(labels) if fault_of(label.as_py() or "") is not None)


def _text(labels: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Where each label starts in their bytes, and where the last one ends, (N + 1,); the bytes."""
    _, offsets, text = labels.buffers()
    starts = np.frombuffer(offsets, np.int64)[labels.offset : labels.offset + len(labels) + 1]
    every = np.frombuffer(text or b"", np.uint8)
    return starts - starts[0], every[starts[0] : starts[-1]]


def lookalikes(labels: pa.Array) -> dict[str, Any] | None:
    """Different labels that are one but for blanks at their ends and Unicode's composed forms.

    labels: (N,) distinct ones, none empty.  Returns how many "labels" there are of the kind, and
    "examples", each a list of those that look alike; None if there are none.
    """
    if not len(labels):
        return None
    starts, text = _text(labels)
    blank = (text[starts[:-1]] <= ord(" ")) | (text[starts[1:] - 1] <= ord(" "))
    ascii_only = pc.string_is_ascii(labels).to_numpy(zero_copy_only=False)
    odd = labels.filter(pa.array(blank | ~ascii_only))
    plain = pc.utf8_normalize(pc.utf8_trim_whitespace(odd), "NFC")
    changed = pc.not_equal(plain, odd)
    odd, plain = odd.filter(changed), plain.filter(changed)
    if not len(odd):
        return None
    others = labels.filter(pc.is_in(labels, value_set=plain.unique()))
    counts = pc.value_counts(pa.chunked_array([plain, others]))
    several = counts.filter(pc.greater(counts.field("counts"), 1))
    if not len(several):
        return None
    examples = []
    for name in several.field("values")[:EXAMPLES]:
        alike = odd.filter(pc.equal(plain, name)).to_pylist()
        examples.append([*others.filter(pc.equal(others, name)).to_pylist(), *alike])
    return {"labels": pc.sum(several.field("counts")).as_py(), "examples": examples}


_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


def numbers(labels: pa.Array) -> np.ndarray:
    """Which labels (N,) are decimal numbers: (N,) bool."""
    starts, text = _text(labels)
    found = np.zeros(len(labels), bool)
    may_be = np.flatnonzero((text[starts[:-1]] >= ord("+")) & (text[starts[:-1]] <= ord("9")))
    if len(may_be):
        matches = pc.match_substring_regex(labels.take(pa.array(may_be)), _NUMBER)
        found[may_be] = matches.to_numpy(zero_copy_only=False)
    return found
