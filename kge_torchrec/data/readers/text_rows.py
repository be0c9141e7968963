"""Read the rows of text files by pyarrow, which numbers them, and name the lines of bad ones."""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

import pyarrow as pa
from pyarrow import csv as arrow_csv

from kge_torchrec.data.readers.fields import TEXT, Block
from kge_torchrec.data.streams import lines as numbered_lines
from kge_torchrec.data.streams import open_bytes, unreadable
from kge_torchrec.errors import DataError

SEPARATORS = {"tab": "\t", "comma": ",", "semicolon": ";", "bar": "|", "blanks": " "}
_IN_WORDS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars", " ": "blanks"}

# Large enough that few entities repeat between blocks, small enough to keep several in memory.
BLOCK_BYTES = 32 << 20
SAMPLE_BYTES = 1 << 20  # of the first lines

Row = tuple[int, list[str]]  # the number of its last line, and its fields


@dataclass(frozen=True)
class Text:
    """How the lines of a file become rows of fields."""

    path: Path
    separator: str
    quoted: bool = False  # whether quotes around a field may hold separators and line ends
    comments: str = ""  # the start of lines that are left out
    skip: int = 0  # lines before the rows
    squeeze: bool = False  # whether several blanks or tabs are one blank
    has_keys: bool = True  # whether keys of the config act on the file, as on files of triples

    @property
    def in_words(self) -> str:
        return _IN_WORDS.get(self.separator, repr(self.separator))

    def remedy(self, text: str) -> str:
        """Return what a message says of keys; nothing where no key acts."""
        return text if self.has_keys else ""

    def rows(self, lines: Iterable[str], strict: bool = False) -> Iterator[Row]:
        """Yield the rows of lines without line ends; blank lines and comments are no rows.

        Raises:
            csv.Error: With ``strict``, quotes that are not closed or that text follows.
        """
        number, gap = 0, None if self.separator == " " else self.separator

        def kept() -> Iterator[str]:
            nonlocal number
            for line in lines:
                number += 1
                is_comment = self.comments and line.startswith(self.comments)
                if number > self.skip and not is_comment and (line if gap else line.strip()):
                    yield line + "\n"

        rows: Iterable[list[str]] = (line[:-1].split(gap) for line in kept())
        if self.quoted:
            rows = csv.reader(kept(), delimiter=self.separator, strict=strict)
        for fields in rows:
            yield number, fields

    def all_rows(self, strict: bool = False) -> Iterator[Row]:
        """Yield the rows of the whole file: slow, to name a line."""
        with io.BufferedReader(open_bytes(self.path), 1 << 20) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline=None)
            yield from self.rows((line.removesuffix("\n") for line in text), strict)

    def line_of(self, row: int) -> int:
        """Return the line of a row by pyarrow's number, which does not count blank lines."""
        return next(islice(self.all_rows(), row - self.skip - 1, None), (row, []))[0]

    def check_quotes(self) -> None:
        """Raise DataError for a quote that is not closed, or that text follows."""
        last = self.skip
        try:
            for row in self.all_rows(strict=True):
                last = row[0]
        except csv.Error as error:
            remedy = self.remedy(", or read quotes as text with data.quotes false")
            raise DataError(
                f"{self.path}:{last + 1}: the quotes of this row are wrong ({error}); correct them"
                f"{remedy}"
            ) from None


def first_lines(path: Path) -> list[str]:
    """Return the lines at the start of a file, without line ends."""
    try:
        with open_bytes(path) as stream:
            start = stream.read(SAMPLE_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path}:1: this is UTF-16; convert the file to UTF-8")
    lines = re.split("\r\n|\r|\n", start.decode("utf-8-sig", "replace"))
    return lines[:-1] if len(start) == SAMPLE_BYTES and len(lines) > 1 else lines


def read_rows(
    text: Text,
    width: int,
    used: Sequence[int],
    leave_out: Callable[[arrow_csv.InvalidRow], object],
) -> Iterator[Block]:
    """Yield the ``used`` columns as text, by position, and what returns file and line of a row.

    ``leave_out`` takes a row that has not ``width`` columns, and raises DataError unless it is to
    be left out.
    """
    left_out: deque[int] = deque()  # numbers of rows, ascending
    wrong: DataError | None = None
    names, number = [str(at) for at in used], text.skip + 1

    def handle(row: arrow_csv.InvalidRow) -> str:
        nonlocal wrong
        left_out.append(row.number)
        try:
            leave_out(row)
        except DataError as error:
            wrong = wrong or error
        return "skip" if wrong is None else "error"

    try:
        with open_bytes(text.path) as file:
            batches = arrow_csv.open_csv(
                _Cleaned(file, text),
                # With threads, rows would have no numbers.
                read_options=arrow_csv.ReadOptions(
                    column_names=[str(at) for at in range(width)],
                    skip_rows=text.skip,
                    block_size=BLOCK_BYTES,
                    use_threads=False,
                ),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=text.separator,
                    quote_char='"' if text.quoted else False,
                    newlines_in_values=text.quoted,
                    invalid_row_handler=handle,
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(names, TEXT),
                    include_columns=names,
                    strings_can_be_null=False,
                    check_utf8=False,
                ),
            )
            for batch in batches:
                first, number = number, number + batch.num_rows
                gaps: list[int] = []
                while left_out and left_out[0] < number:
                    gaps.append(left_out.popleft())
                    number += 1
                yield (
                    dict(zip(used, batch.columns, strict=True)),
                    partial(_place, text, first, gaps),
                )
    except pa.ArrowInvalid as error:
        raise _damage(text, wrong, error) from None
    except OSError as error:
        raise unreadable(text.path, error) from error


def _place(text: Text, first: int, gaps: Sequence[int], row: int) -> str:
    number = first + row
    for gap in gaps:
        number += gap <= number
    return f"{text.path}:{text.line_of(number)}"


class _Cleaned:
    """A file for pyarrow without comments, and with one blank for each gap if `Text.squeeze`.

    Bytes that are no UTF-8 raise DataError.  pyarrow would notice them too late: it decodes a row
    to say that its number of columns is wrong.
    """

    closed = False

    def __init__(self, stream: IO[bytes], text: Text):
        self._stream, self._text, self._rest, self._number = stream, text, b"", 1
        start = re.escape(text.comments.encode())
        line = rb"(?<![^\r\n])(?:\xef\xbb\xbf)?" + start + rb"[^\r\n]*"
        self._comment = re.compile(line) if start else None

    def read(self, size: int) -> bytes:
        """Return whole lines, about so many bytes."""
        while True:
            block = self._stream.read(size)
            lines = self._rest + block
            end = lines.rfind(b"\n") + 1 if block else len(lines)
            lines, self._rest = lines[:end], lines[end:]
            if not lines.isascii():
                self._check(lines)
            self._number += lines.count(b"\n")
            lines = self._clean(lines)
            if lines or not block:
                return lines

    def _check(self, lines: bytes) -> None:
        try:
            lines.decode()
        except UnicodeDecodeError as error:
            number = self._number + lines.count(b"\n", 0, error.start)
            place = error.start - lines.rfind(b"\n", 0, error.start)
            raise DataError(
                f"{self._text.path}:{number}: invalid UTF-8 (byte 0x{lines[error.start]:02x} at "
                f"position {place} of the line); convert the file to UTF-8"
            ) from error

    def _clean(self, lines: bytes) -> bytes:
        if self._comment is not None:
            lines = self._comment.sub(b"", lines)
        if self._text.squeeze:
            lines = b"\n" + lines.replace(b"\t", b" ")
            for gap in (b"  ", b"\n ", b" \n", b" \r"):
                while gap in lines:
                    lines = lines.replace(gap, gap.replace(b" ", b"", 1))
            lines = lines[1:]
        return lines

    def close(self) -> None:
        """Close nothing: the caller closes the stream."""


def _damage(text: Text, wrong: DataError | None, error: Exception) -> DataError:
    """Return the error of a file that pyarrow cannot read; ``wrong`` is what is known of it."""
    try:
        if text.quoted:
            text.check_quotes()
    except DataError as found:
        return found
    for number, line in () if wrong else numbered_lines(text.path):
        if len(line) > BLOCK_BYTES // 4:
            wrong = DataError(
                f"{text.path}:{number}: a line of {len(line):,} bytes; is a line end missing?"
            )
    return wrong or DataError(f"{text.path}: {error}")
