"""TSV and CSV files to record batches, streamed; faulty rows are named by file and line."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from kge_torchrec.data.streams import (
    COLUMNS,
    OnBytes,
    lines,
    open_bytes,
    places,
    role,
    roles,
    unclear,
    unreadable,
)
from kge_torchrec.errors import DataError

# Large enough that few entities repeat between blocks, small enough to keep several in memory.
BLOCK_BYTES = 32 << 20


def read_delimited(
    path: Path, delimiter: str, has_header: bool | None = None, on_bytes: OnBytes | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches of the string columns head, relation, tail.

    Tabs separate fields that are taken as they are; with commas, fields may be quoted (RFC 4180).
    ``has_header=None`` recognises a header by `header.roles`. Blank lines are skipped.

    Raises:
        DataError: naming file and line: an empty file, a row without exactly three non-empty
            fields, invalid UTF-8.
    """
    line, fields = _first_row(path, delimiter, has_header)
    order = roles(fields) if has_header is not False else None
    skip = line if has_header or order else 0
    count = 0
    try:
        with open_bytes(path, on_bytes) as stream:
            for batch in _open_csv(stream, delimiter, order or COLUMNS, skip):
                if any(pc.min(pc.binary_length(column)).as_py() == 0 for column in batch.columns):
                    raise pa.ArrowInvalid("empty field")
                count += batch.num_rows
                yield batch.select(list(COLUMNS))
    except pa.ArrowInvalid as error:
        if not (skip and "Could not skip" in str(error)):  # nothing follows, not even a line end
            raise _fault(path, delimiter) or DataError(f"{path}: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if count == 0:
        raise DataError(f"{path}: no triples after the header")


def _open_csv(
    stream: pa.NativeFile, delimiter: str, names: Sequence[str], skip: int
) -> arrow_csv.CSVStreamingReader:
    quoted = delimiter == ","
    return arrow_csv.open_csv(
        stream,
        read_options=arrow_csv.ReadOptions(
            column_names=list(names), skip_rows=skip, block_size=BLOCK_BYTES
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_string()), strings_can_be_null=False
        ),
    )


def _rows(path: Path, delimiter: str, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Rows with the number of their last line, one by one.

    Raises DataError for invalid UTF-8 and for what is no CSV; ``strict`` also for quotes that are
    not closed or followed by text.
    """

    def decoded() -> Iterator[tuple[int, str]]:
        for number, line in lines(path):
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: invalid UTF-8 (byte 0x{line[error.start]:02x} at position "
                    f"{error.start + 1} of the line); convert the file to UTF-8"
                ) from error

    if delimiter == "\t":
        yield from ((number, text.split("\t")) for number, text in decoded() if text)
        return
    texts = (text + "\n" for _, text in decoded())
    reader = csv.reader(texts, delimiter=delimiter, strict=strict)
    try:
        yield from ((reader.line_num, fields) for fields in reader if fields)
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num}: not readable as CSV: {_reason(error)}"
        ) from error


def _reason(error: csv.Error) -> str:
    """What Python's csv module means."""
    if "new-line character" in str(error):
        return "carriage return inside a field without quotes; end lines with \\n or \\r\\n"
    if "field limit" in str(error):
        limit = csv.field_size_limit()
        return f"a field of more than {limit:,} characters; is there a quote that is not closed?"
    if "unexpected end of data" in str(error):
        return "a quote is not closed"
    return str(error)


def _first_row(path: Path, delimiter: str, has_header: bool | None) -> tuple[int, list[str]]:
    for line, fields in _rows(path, delimiter):
        if has_header is not False:
            _check_header(path, line, fields, delimiter)
        _check_row(path, line, fields, delimiter)
        return line, fields
    raise DataError(f"{path}: empty file: no triples")


def _check_header(path: Path, line: int, fields: list[str], delimiter: str) -> None:
    """Raises DataError for a header, known by its words, of other than three columns."""
    meant, found = [role(field) for field in fields], places(fields)
    if len(fields) == 3 or not (set(COLUMNS) <= set(meant) or (len(fields) == 2 and all(meant))):
        return
    header = f"{path}:{line}: this is a header of {len(fields)} columns: {', '.join(fields)}"
    if found is None:
        raise DataError(f"{header}; {unclear(fields)}. Give three: head, relation and tail")
    extra = [field for place, field in enumerate(fields) if place not in found]
    numbers = ",".join(str(place + 1) for place in sorted(found))
    cut = f"cut -f{numbers}"
    if delimiter != "\t":
        cut = f"cut -d, -f{numbers} if no field is quoted"
    raise DataError(
        f"{header}; triples have three: {', '.join(fields[place] for place in found)}. Remove "
        f"{', '.join(map(repr, extra))} (for example with {cut}), or save it as Parquet, "
        "where columns are found by name and others are left out"
    )


def _check_row(path: Path, line: int, fields: list[str], delimiter: str) -> None:
    kind = "tab" if delimiter == "\t" else "comma"
    if len(fields) != 3:
        shown = delimiter.join(fields)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise DataError(
            f"{path}:{line}: expected 3 {kind}-separated columns (head, relation, tail), "
            f"found {len(fields)}: {shown!r}"
        )
    for column, field in zip(COLUMNS, fields, strict=True):
        if not field:
            raise DataError(f"{path}:{line}: the {column} is empty")
        if "\r" in field:
            raise DataError(f"{path}:{line}: carriage return inside the {column}")


def _fault(path: Path, delimiter: str) -> DataError | None:
    """The first faulty row, found by reading the file again row by row."""
    for strict in (False, True):
        try:
            for line, fields in _rows(path, delimiter, strict):
                _check_row(path, line, fields, delimiter)
        except DataError as error:
            return error
    return None
