"""Read the rows of text files by pyarrow, which numbers them, and name the lines of bad ones."""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from pyarrow import csv as arrow_csv

from kge_torchrec.data.readers.fields import TEXT, Block
from kge_torchrec.data.streams import BYTE_ORDER_MARK, open_bytes, unreadable
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
    separator: str  # a character; for a blank, several blanks or tabs are one
    quoted: bool = False  # whether quotes around a field may hold separators and line ends
    comments: str = ""  # the start of lines that are left out
    skip: int = 0  # lines before the rows
    has_keys: bool = True  # whether keys of the config act on the file, as on files of triples

    @property
    def in_words(self) -> str:
        return _IN_WORDS.get(self.separator, repr(self.separator))

    def remedy(self, text: str) -> str:
        """Return what a message says of keys; nothing where no key acts."""
        return text if self.has_keys else ""

    def blocks(self, stream: IO[bytes]) -> Iterator[bytes]:
        """Yield some lines at a time, of which comments are empty, and gaps one blank.

        Raises DataError for bytes that are no UTF-8.  pyarrow would notice them too late: it
        decodes a row to say that its number of columns is wrong.
        """
        start = re.escape(self.comments.encode())
        comment = re.compile(rb"(?<![^\r\n])" + start + rb"[^\r\n]*")
        block, rest, number = b"\n", b"", 1
        while block:
            block = stream.read(BLOCK_BYTES)
            lines = rest + block
            end = lines.rfind(b"\n") + 1 if block else len(lines)
            lines, rest = lines[:end], lines[end:]
            if not lines.isascii():
                self._check(lines, number)
                lines = lines.removeprefix(BYTE_ORDER_MARK) if number == 1 else lines
            number += lines.count(b"\n")
            if start:
                lines = comment.sub(b"", lines)
            if self.separator == " ":
                lines = b"\n" + lines.replace(b"\t", b" ")
                for gap in (b"  ", b"\n ", b" \n", b" \r"):
                    while gap in lines:
                        lines = lines.replace(gap, gap.replace(b" ", b"", 1))
                lines = lines[1:]
            if lines:
                yield lines

    def _check(self, lines: bytes, number: int) -> None:
        try:
            lines.decode()
        except UnicodeDecodeError as error:
            number += lines.count(b"\n", 0, error.start)
            place = error.start - lines.rfind(b"\n", 0, error.start)
            raise DataError(
                f"{self.path}:{number}: invalid UTF-8 (byte 0x{lines[error.start]:02x} at "
                f"position {place} of the line); convert the file to UTF-8"
            ) from error

    def rows(self, stream: IO[bytes], strict: bool = False) -> Iterator[Row]:
        """Yield the rows, without blank lines: slow, for the first ones or to name a line.

        With ``strict``, raises csv.Error for quotes that are not closed or that text follows.
        """
        texts = (block.decode() for block in self.blocks(stream))
        every = (line for text in texts for line in io.StringIO(text, newline=None))
        lines = islice(every, self.skip, None)
        if self.quoted:
            reader = csv.reader(lines, delimiter=self.separator, strict=strict)
            yield from ((self.skip + reader.line_num, fields) for fields in reader if fields)
        for number, line in enumerate(lines, self.skip + 1):
            if line := line.removesuffix("\n"):
                yield number, line.split(self.separator)

    def line_of(self, row: int) -> int:
        """Return the line of a row by pyarrow's number, which does not count blank lines."""
        with open_bytes(self.path) as stream, suppress(csv.Error):  # of a field that is too long
            return next(islice(self.rows(stream), row - self.skip - 1, None), (row, []))[0]
        return row

    def check_quotes(self) -> None:
        """Raise DataError for a quote that is not closed, or that text follows."""
        last = self.skip
        try:
            with open_bytes(self.path) as stream:
                for row in self.rows(stream, strict=True):
                    last = row[0]
        except csv.Error as error:
            remedy = self.remedy(", or read quotes as text with data.quotes false")
            raise DataError(
                f"{self.path}:{last + 1}: the quotes of this row are wrong ({error}); correct them"
                f"{remedy}"
            ) from None


def first_bytes(path: Path) -> bytes:
    """Return the lines at the start of a file."""
    try:
        with open_bytes(path) as stream:
            start: bytes = stream.read(SAMPLE_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    end = start.rfind(b"\n") + 1 if len(start) == SAMPLE_BYTES else 0
    return start[:end] if end else start


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
                _File(text.blocks(file)),
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
        if text.quoted:
            text.check_quotes()
        raise wrong or DataError(f"{text.path}: {error}") from None
    except OSError as error:
        raise unreadable(text.path, error) from error


def _place(text: Text, first: int, gaps: Sequence[int], row: int) -> str:
    number = first + row
    for gap in gaps:
        number += gap <= number
    return f"{text.path}:{text.line_of(number)}"


class _File:
    """Blocks as a file that pyarrow reads."""

    closed = False

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks = blocks

    def read(self, _: Any) -> bytes:
        return next(self._blocks, b"")

    def close(self) -> None: ...
