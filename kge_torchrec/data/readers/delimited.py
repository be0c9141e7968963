"""Read text files whose columns are separated by a character; errors name file and line.

The first lines show the separator and whether there is a header.  pyarrow reads the file in blocks
and numbers its rows.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data.labels import text_of
from kge_torchrec.data.readers.columns import Columns, Found, as_read, clipped
from kge_torchrec.data.readers.fields import Raw, Skipped, Table
from kge_torchrec.data.readers.text_rows import (
    SEPARATORS,
    Row,
    Text,
    check_quotes,
    first_lines,
    read_rows,
)
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
    lines = first_lines(path)
    text = _text(path, lines, columns, data)
    if not data.separator and text.separator != SUFFIXES.get(suffix_of(path), "\t"):
        remedy = text.remedy("; data.separator sets another")
        notes.append((str(path), f"separated by {text.in_words}{remedy}"))
    rows = _sample(text, lines)
    if not rows:
        if text.quoted:
            check_quotes(text)
        raise DataError(f"{path}: empty file: no triples")
    count = None
    if len(rows) > 1 and len(rows[1][1]) > 1 and re.fullmatch("[0-9]{1,18}", "\t".join(rows[0][1])):
        line, (number,) = rows.pop(0)  # of OpenKE: the number of rows that follow
        count, text = int(number), replace(text, skip=line)
    size = _most(rows, columns)[0] or len(rows[0][1])
    is_bad = len(rows[0][1]) != size  # which is said when rows are read
    line, fields = next(row for row in rows if len(row[1]) == size)
    place, shown = f"{path}:{line}", f"{path}:{line}: separated by {text.in_words}"
    is_header, in_doubt = False, False
    if not is_bad:
        is_header, in_doubt = _recognized([row for _, row in rows], columns, data.has_header)
    try:
        found = columns.find(shown, fields, is_header)
    except DataError as error:
        raise DataError(f"{error}{text.remedy(_hint(fields, columns))}") from None
    if is_header:
        columns, text = columns.with_spaces(place, fields), replace(text, skip=line)
        if len(rows) == 1:
            raise DataError(f"{place}: this line is read as a header, and no row follows it")
        if data.has_header is None and not columns.is_given:
            said = f"this line is read as a header: {as_read(fields, found.places)}"
            remedy = "; data.has_header false reads it as a row, data.columns ROLE=COLUMN,... other"
            notes.append((place, said + text.remedy(f"{remedy} columns")))
    elif in_doubt:
        said = f"this line is read as a triple: {', '.join(repr(clipped(f)) for f in fields)}"
        notes.append((place, f"{said}; data.has_header true reads it as a header"))
    skipped = Skipped() if data.bad_lines == "skip" else None
    raws = _raws(text, found, fields, is_header, data.quotes is None, count, skipped)
    return Table(str(path), columns, found, raws, notes, skipped)


# The first lines


def first_row(path: Path, columns: Columns, data: DataConfig) -> list[str]:
    """Return the fields of the first row of a file, which may be names."""
    lines = first_lines(path)
    rows = _sample(_text(path, lines, columns, data), lines)
    return rows[0][1] if rows else []


def _sample(text: Text, lines: Iterable[str]) -> list[Row]:
    rows: list[Row] = []
    with suppress(csv.Error):  # reading the whole file says where
        rows.extend(islice(text.rows(lines), SAMPLE_ROWS))
    return rows


def _text(path: Path, lines: Sequence[str], columns: Columns, data: DataConfig) -> Text:
    """Return how a file is cut: by the separator that gives half of the rows enough columns."""

    def cut(separator: str) -> Text:
        quoted = separator not in "\t " if data.quotes is None else data.quotes
        return Text(path, separator, quoted, data.comments, data.skip, columns.of_triples)

    if data.separator:
        return cut(SEPARATORS.get(data.separator, data.separator))
    usual, best = SUFFIXES.get(suffix_of(path), "\t"), (0.0, "")
    for separator in dict.fromkeys((usual, *SEPARATORS.values())):
        rows = _sample(cut(separator), lines[: data.skip + 100])
        share = _most(rows, columns)[1] / max(1, len(rows))
        if share >= 0.5:
            return cut(separator)
        best = max(best, (share, separator), key=lambda pair: pair[0])
    return cut(best[1] or usual)


def _most(rows: Sequence[Row], columns: Columns) -> tuple[int, int]:
    """Return the size that most rows with enough columns have, and their number, or zeros."""
    sizes = Counter(len(fields) for _, fields in rows if len(fields) >= columns.width)
    return sizes.most_common(1)[0] if sizes else (0, 0)


_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?([eE][-+]?\d+)?|\d{4}-\d\d-\d\d[T ]?[\d:.Z+-]*")
_NAME = re.compile(r"[A-Za-z_#?@:][\w .:()-]{0,40}")


def _recognized(
    rows: Sequence[list[str]], columns: Columns, header: bool | None
) -> tuple[bool, bool]:
    """Return whether the first row is a header, and whether that is in doubt.

    A header has known names, or stands above numbers, or resembles no row below it.
    """
    first, others = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    if header is not None:
        return header, False
    if columns.are_named(first):
        return True, False
    below = [set(column) for column in zip(*others, strict=True)]
    if len(others) < 2 or not all(map(_NAME.fullmatch, first)) or len(set(first)) < len(first):
        return False, False
    if any(name in values for name in first for values in below):
        return False, False  # the name recurs
    if any(all(map(_NUMBER.fullmatch, values)) for values in below):
        return True, False
    shapes = [{_shape(value) for value in values} for values in below]
    odd = [
        len(own) == 1 and _shape(name) not in own for own, name in zip(shapes, first, strict=True)
    ]
    if sum(odd) > 1:
        return True, False
    if len(first) != 3:
        return False, False
    relations = len(below[1])  # relations recur, and this one does not
    return len(others) >= max(100, 10 * relations), relations < len(others)


def _shape(value: str) -> str:
    """Return a value with a for letters and 0 for digits: "user_17" -> "a_0"."""
    return re.sub("[^\\W\\d_]+", "a", re.sub(r"\d+", "0", value))


def _hint(fields: Sequence[str], columns: Columns) -> str:
    """Return what a last column of numbers may be, as a sentence."""
    last, at = fields[-1], len(fields) - 1
    if len(fields) != len(columns.positional) + 1 or not _NUMBER.fullmatch(last):
        return ""
    is_time = "-" in last[1:] or re.fullmatch(r"1\d{9}(\d{3}){0,3}(\.\d+)?", last)
    role = "time" if is_time else "weight"
    return f". If column {at} is the {role}, data.columns {role}={at} reads it"


# All rows


def _raws(
    text: Text,
    found: Found,
    fields: Sequence[str],
    is_header: bool,
    strips: bool,
    count: int | None,
    skipped: Skipped | None,
) -> Iterator[Raw]:
    """Yield the rows in blocks.

    ``fields`` are the names of columns, or without a header those of the first row; ``count`` is
    the number of rows by the file itself.  ``strips`` says whether quotes around a field that
    cannot hold separators are no part of it.
    """
    places, total, has_line_ends = found.places, 0, False
    used = {*places.values(), *found.others.values(), *([0] if text.comments else [])}

    def leave_out(row: arrow_csv.InvalidRow) -> DataError | None:
        if text.comments and row.text.startswith(text.comments):
            return None
        if skipped is None:
            said = _wrong_size(text, places, len(fields), row)
            return DataError(said + text.remedy(_remedy(text, row.text)))
        skipped.add("columns", 1, lambda _: _wrong_size(text, places, len(fields), row))
        return None

    is_blank = text.separator == " "
    for batch, place in read_rows(text, len(fields), sorted(used), leave_out, is_blank):
        cells = {at: batch[str(at)] for at in used}
        if text.quoted:
            has_line_ends = has_line_ends or any(_has(c, b"\n") for c in cells.values())
        elif strips:
            cells = {at: _bare(column) for at, column in cells.items()}
        total += batch.num_rows
        yield Raw(
            {role: cells[at] for role, at in places.items()},
            {name: cells[at] for name, at in found.others.items()},
            place,
            pc.starts_with(cells[0], text.comments) if text.comments else None,
            _headers(cells, places, fields) if is_header else None,
        )
    if has_line_ends:
        check_quotes(text)
    if count not in (None, total) and skipped is None and not text.comments:
        raise DataError(f"{text.path}: its first line says {count:,} rows, and {total:,} follow it")


def _headers(
    cells: Mapping[int, pa.Array], places: Mapping[str, int], fields: Sequence[str]
) -> pa.Array | None:
    """Return which rows (B,) are the header again, or None if none is."""
    same = (pc.equal(cells[at], fields[at]) for at in places.values())
    first = next(same)
    return reduce(pc.and_, same, first) if pc.any(first).as_py() else None


def _wrong_size(
    text: Text, places: Mapping[str, int], width: int, row: arrow_csv.InvalidRow
) -> str:
    roles = {at: role for role, at in places.items()}
    names = ", ".join(roles.get(at, f"column {at}") for at in range(width))
    return (
        f"{text.path}:{text.line_of(row.number)}: expected {width} columns separated by "
        f"{text.in_words} ({names}), found {row.actual_columns}: {clipped(row.text, 80)!r}"
    )


def _remedy(text: Text, row: str) -> str:
    """Return what to do with a row of another size."""
    if row[:1] in ("#", "%"):
        return f"; data.comments '{row[0]}' leaves such lines out"
    if '"' in row:
        how = "as text" if text.quoted else "around fields"
        other = str(not text.quoted).lower()
        return f"; is a quote missing? data.quotes {other} reads quotes {how}"
    return "; data.bad_lines skip leaves such lines out and counts them"


def _has(column: pa.Array, text: bytes) -> bool:
    return text in text_of(column)[1].tobytes()


def _bare(column: pa.Array) -> pa.Array:
    """Return labels without the quotes that are around some of them."""
    if not _has(column, b'"'):
        return column
    is_quoted = pc.match_substring_regex(column, '(?s)^"(?:[^"]|"")*"$')
    inner = pc.replace_substring(pc.utf8_slice_codeunits(column, 1, -1), '""', '"')
    return pc.if_else(is_quoted, inner, column)
