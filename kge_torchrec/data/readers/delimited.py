"""Read text files whose columns are separated by a character; errors name file and line.

The first lines show the separator and whether there is a header.  pyarrow reads the file in blocks
and numbers its rows.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data.readers.columns import NUMBER, Columns, Found, clipped
from kge_torchrec.data.readers.fields import Block, Skipped, Table, no_rows
from kge_torchrec.data.readers.text_rows import SEPARATORS, Row, Text, first_bytes, read_rows
from kge_torchrec.data.streams import suffix_of
from kge_torchrec.errors import DataError

# The usual separator, by the end of a file's name.
SUFFIXES = {".tsv": "\t", ".txt": "\t", ".tab": "\t", ".del": "\t", ".dict": "\t", ".csv": ","}

SAMPLE_ROWS = 1000  # of the first lines


def open_delimited(path: Path, columns: Columns, data: DataConfig) -> Table:
    """Open a file of text.

    Raises:
        DataError: The file is empty, or columns are missing or unclear.  While rows are read: a row
            has another number of columns, is the header again, or is no UTF-8.
    """
    notes: list[tuple[str, str]] = []
    start = first_bytes(path)
    text = _text(path, start, columns, data)
    if not data.separator and text.separator != SUFFIXES.get(suffix_of(path), "\t"):
        remedy = text.remedy("; data.separator sets another")
        notes.append((str(path), f"separated by {text.in_words}{remedy}"))
    rows = _sample(text, start)
    if not rows:
        if text.quoted:
            text.check_quotes()
        raise no_rows(path, columns)
    count = None
    if len(rows) > 1 and len(rows[1][1]) > 1 and re.fullmatch("[0-9]{1,18}", "\t".join(rows[0][1])):
        line, (number,) = rows.pop(0)  # of OpenKE: the number of rows that follow
        count, text = int(number), replace(text, skip=line)
    size = _most(rows, columns)[0] or len(rows[0][1])
    line, fields = next(row for row in rows if len(row[1]) == size)
    place = f"{path}:{line}"
    is_header: bool | None = False
    if fields is rows[0][1]:  # otherwise the first row is wrong, which is said when rows are read
        is_header = data.has_header
        if is_header is None:
            is_header = _is_header(
                fields, [row for _, row in rows[1:] if len(row) == size], columns
            )
    found = columns.find(f"{place}: separated by {text.in_words}", fields, bool(is_header))
    if is_header:
        text = replace(text, skip=line)
        if len(rows) == 1:
            raise DataError(f"{place}: this line is read as a header, and no row follows it")
        if data.has_header is None and not columns.is_given:
            remedy = "; data.has_header false reads it as a row, data.columns ROLE=COLUMN,... other"
            remedy = text.remedy(f"{remedy} columns")
            notes.append((place, f"this line is read as a header: {found}{remedy}"))
    elif is_header is None:
        said = f"this line is read as a triple: {', '.join(repr(clipped(f)) for f in fields)}"
        notes.append((place, f"{said}; data.has_header true reads it as a header"))
    skipped = Skipped() if data.bad_lines == "skip" else None
    blocks = _blocks(text, found, size, data.quotes is None, count, skipped)
    header = {at: fields[at] for at in found.places.values()} if is_header else {}
    return Table(str(path), columns, found, blocks, notes, header, skipped)


# The first lines


def _sample(text: Text, start: bytes, count: int = SAMPLE_ROWS) -> list[Row]:
    rows: list[Row] = []
    with suppress(csv.Error):  # reading the whole file says where
        rows.extend(islice(text.rows(io.BytesIO(start)), count))
    return rows


def _text(path: Path, start: bytes, columns: Columns, data: DataConfig) -> Text:
    """Return how a file is cut: by the separator that gives half of the rows enough columns."""

    def cut(separator: str) -> Text:
        quoted = separator not in "\t " if data.quotes is None else data.quotes
        return Text(path, separator, quoted, data.comments, data.skip, columns.of_triples)

    if data.separator:
        return cut(SEPARATORS.get(data.separator, data.separator))
    usual, shares = SUFFIXES.get(suffix_of(path), "\t"), {}
    for separator in dict.fromkeys((usual, *SEPARATORS.values())):
        rows = _sample(cut(separator), start, 100)
        shares[separator] = min(0.5, _most(rows, columns)[1] / max(1, len(rows)))
    return cut(max(shares, key=lambda separator: shares[separator]))  # the first of equal ones


def _most(rows: Sequence[Row], columns: Columns) -> tuple[int, int]:
    """Return the size that most rows with enough columns have, and their number, or zeros."""
    sizes = Counter(len(fields) for _, fields in rows if len(fields) >= columns.width)
    return sizes.most_common(1)[0] if sizes else (0, 0)


_NAME = re.compile(r"[A-Za-z_#?@:][\w .:()-]{0,40}")


def _is_header(first: list[str], others: list[list[str]], columns: Columns) -> bool | None:
    """Return whether a first row is a header, or None where that is in doubt.

    A header has known names, or stands above numbers, or resembles no row below it.
    """
    if columns.are_named(first):
        return True
    below = [set(column) for column in zip(*others, strict=True)]
    if len(others) < 2 or not all(map(_NAME.fullmatch, first)) or len(set(first)) < len(first):
        return False
    if any(name in values for name in first for values in below):
        return False  # the name recurs
    if any(all(map(NUMBER.fullmatch, values)) for values in below):
        return True
    shapes = [{_shape(value) for value in values} for values in below]
    unlike = [
        len(own) == 1 and own != {_shape(name)} for own, name in zip(shapes, first, strict=True)
    ]
    if sum(unlike) > 1 or len(first) != 3:
        return sum(unlike) > 1
    relations = len(below[1])  # relations recur, and this one does not
    return len(others) >= max(100, 10 * relations) or (None if relations < len(others) else False)


def _shape(value: str) -> str:
    """Return a value with a for letters and 0 for digits: "user_17" -> "a_0"."""
    return re.sub("[^\\W\\d_]+", "a", re.sub(r"\d+", "0", value))


# All rows


def _blocks(
    text: Text, found: Found, width: int, strips: bool, count: int | None, skipped: Skipped | None
) -> Iterator[Block]:
    """Yield the rows.

    ``count`` is the number of rows by the file itself.  ``strips`` says whether quotes around a
    field that cannot hold separators are no part of it.
    """
    total, has_line_ends = 0, False
    roles = {at: role for role, at in found.places.items()}
    names = ", ".join(roles.get(at, f"column {at}") for at in range(width))

    def wrong_size(row: arrow_csv.InvalidRow) -> str:
        return (
            f"{text.path}:{text.line_of(row.number)}: expected {width} columns separated by "
            f"{text.in_words} ({names}), found {row.actual_columns}: {clipped(row.text, 80)!r}"
        )

    def leave_out(row: arrow_csv.InvalidRow) -> None:
        if skipped is None:
            raise DataError(wrong_size(row) + text.remedy(_remedy(text, row.text)))
        skipped.add(1, lambda _: wrong_size(row))

    used = sorted({*roles, *found.others.values()})
    for cells, place in read_rows(text, width, used, leave_out):
        if text.quoted:
            has_line_ends |= any(_has(column, "\n") for column in cells.values())
        elif strips:
            cells = {at: _bare(column) for at, column in cells.items()}
        total += len(next(iter(cells.values())))
        yield cells, place
    if has_line_ends:
        text.check_quotes()
    if count not in (None, total) and skipped is None:
        raise DataError(f"{text.path}: its first line says {count:,} rows, and {total:,} follow it")


def _remedy(text: Text, row: str) -> str:
    """Return what to do with a row of another size."""
    if row[:1] in ("#", "%"):
        return f"; data.comments '{row[0]}' leaves such lines out"
    if '"' in row:
        how = "as text" if text.quoted else "around fields"
        other = str(not text.quoted).lower()
        return f"; is a quote missing? data.quotes {other} reads quotes {how}"
    return "; data.bad_lines skip leaves such lines out and counts them"


def _has(column: pa.Array, text: str) -> bool:
    return bool(pc.any(pc.match_substring(column, text)).as_py())


def _bare(column: pa.Array) -> pa.Array:
    """Return labels without the quotes that are around some of them."""
    if not _has(column, '"'):
        return column
    is_quoted = pc.match_substring_regex(column, '(?s)^"(?:[^"]|"")*"$')
    inner = pc.replace_substring(pc.utf8_slice_codeunits(column, 1, -1), '""', '"')
    return pc.if_else(is_quoted, inner, column)
