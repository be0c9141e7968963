"""Read TSV and CSV files as a stream of record batches; errors name file and line."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyarrow import csv as arrow_csv

from kge_torchrec.data import COLUMNS, TIME, WEIGHT
from kge_torchrec.data.labels import fault_of, first_fault
from kge_torchrec.data.readers.columns import (
    EDGE,
    TYPES,
    ColumnChoice,
    FirstLine,
    NotATime,
    NotAWeight,
    OnFirstLine,
    parse_times,
    parse_weights,
    places,
    role,
    unclear,
    with_types,
)
from kge_torchrec.data.streams import open_bytes, text_lines, unreadable
from kge_torchrec.errors import DataError

# Large enough that few entities repeat between blocks, small enough to keep several in memory.
BLOCK_BYTES = 32 << 20


class _Layout(NamedTuple):
    """The roles of the columns of a file.

    Args:
        columns: Their roles; columns with None are left out.
        skip: Number of lines before the first triple.
    """

    columns: list[str | None]
    skip: int

    @property
    def names(self) -> list[str]:
        """A name for each column of the file."""
        return [column or f"column {place}" for place, column in enumerate(self.columns, 1)]

    @property
    def wanted(self) -> list[str]:
        """The columns that are read, in the order of a batch."""
        return [name for name in (*COLUMNS, WEIGHT, TIME, *TYPES) if name in self.columns]


def read_delimited(
    path: Path,
    delimiter: str,
    has_header: bool | None = None,
    choice: ColumnChoice = ColumnChoice(),  # noqa: B008 - immutable
    on_first_line: OnFirstLine | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the string columns head, relation, tail, and of weight and time if any.

    Fields between tabs are taken as they are; with commas, fields may be quoted (RFC 4180).  Blank
    lines are skipped.

    Args:
        path: The file.
        delimiter: A tab or a comma.
        has_header: None recognizes a header by its words (`columns.roles`).
        choice: Which columns are read.
        on_first_line: Called with how the first line was read, unless ``has_header`` is False or
            ``choice`` names the columns.

    Raises:
        DataError: An empty file, a row with another number of fields or with a label that is
            refused (`labels.fault_of`), a weight that is not positive and finite, a time that is
            no number and no date, or invalid UTF-8; named by file and line.
    """
    layout, first = _layout(path, delimiter, has_header, choice)
    if on_first_line and first is not None:
        on_first_line(first)
    count, last = 0, ""
    try:
        with open_bytes(path) as stream:
            for batch in _open_csv(stream, delimiter, layout):
                if any(map(first_fault, batch.columns)):
                    raise pa.ArrowInvalid("no label")
                if batch.num_rows:
                    count += batch.num_rows
                    last = "".join(column[-1].as_py() for column in batch.columns)
                yield with_types(str(path), _with_numbers(batch), choice.edge)
    except (pa.ArrowInvalid, NotAWeight, NotATime) as error:
        # The first: nothing follows the header, not even a line end.
        if not (layout.skip and "Could not skip" in str(error)):
            place = str(path)
            if isinstance(error, NotATime):  # each may be a time, but of two kinds
                place += f": triple {count - batch.num_rows + error.row + 1:,}"
            raise _fault(path, delimiter, layout) or DataError(f"{place}: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if count == 0:
        raise DataError(f"{path}: no triples after the header")
    if "\n" in last and (fault := _fault(path, delimiter, layout)):
        raise fault  # a quote that nobody closed has taken in the rest of the file


def _with_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with weights and times in place of their text."""
    for name, parse in ((WEIGHT, parse_weights), (TIME, parse_times)):
        if name in batch.schema.names:
            place = batch.schema.names.index(name)
            batch = batch.set_column(place, name, parse(batch[name]))
    return batch


def _open_csv(
    stream: pa.NativeFile, delimiter: str, layout: _Layout
) -> arrow_csv.CSVStreamingReader:
    quoted = delimiter == ","
    return arrow_csv.open_csv(
        stream,
        read_options=arrow_csv.ReadOptions(
            column_names=layout.names, skip_rows=layout.skip, block_size=BLOCK_BYTES
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(layout.names, pa.large_string()),
            include_columns=layout.wanted,
            strings_can_be_null=False,
        ),
    )


def _rows(path: Path, delimiter: str, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield rows with the number of their last line.

    Raises:
        DataError: Invalid UTF-8 or invalid CSV; with ``strict`` also quotes that are not closed or
            that text follows.
    """
    if delimiter == "\t":
        yield from ((number, text.split("\t")) for number, text in text_lines(path) if text)
        return
    texts = (text + "\n" for _, text in text_lines(path))
    reader = csv.reader(texts, delimiter=delimiter, strict=strict)
    try:
        yield from ((reader.line_num, fields) for fields in reader if fields)
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num}: not readable as CSV: {_reason(error)}"
        ) from error


def _reason(error: csv.Error) -> str:
    """Return what an error of Python's csv module means."""
    if "new-line character" in str(error):
        return "carriage return inside a field without quotes; end lines with \\n or \\r\\n"
    if "field limit" in str(error):
        limit = csv.field_size_limit()
        return f"a field of more than {limit:,} characters; is there a quote that is not closed?"
    if "unexpected end of data" in str(error):
        return "a quote is not closed"
    return str(error)


def _layout(
    path: Path, delimiter: str, has_header: bool | None, choice: ColumnChoice
) -> tuple[_Layout, FirstLine | None]:
    """Return the layout by the first row, and how that row was read, if it was a guess.

    Raises:
        DataError: The row fits nothing.
    """
    line, fields = next(_rows(path, delimiter), (0, []))
    if not line:
        raise DataError(f"{path}: empty file: no triples")
    choice.check_time_column(f"{path}:{line}", fields)
    if choice.edge is not None:
        return _edge_layout(path, (line, fields), delimiter, has_header, choice)
    header = None if has_header is False and choice.names is None else choice.named(fields)
    if choice.names is not None:
        if header is None or has_header is False:
            why = choice.lacking(fields) if header is None else "files without a header have none"
            raise DataError(f"{path}:{line}: columns by name: {why}")
        return _Layout(header, line), None
    if header is not None:
        return _Layout(header, line), _header(path, line, fields, header)
    if has_header is not False:
        _check_header(path, line, fields, choice)
    columns = _in_order(COLUMNS, len(fields), choice)
    layout = _Layout(columns, line if has_header else 0)
    if not (has_header and len(columns) > 3):  # a header of words that are not known, above numbers
        _check_row(path, line, fields, delimiter, layout, hint=choice.weights is None)
    if has_header:
        return layout, _header(path, line, fields, columns)
    if has_header is False:
        return layout, None
    return layout, FirstLine(str(path), line, _clipped(fields), None)


def _edge_layout(
    path: Path,
    row: tuple[int, list[str]],
    delimiter: str,
    has_header: bool | None,
    choice: ColumnChoice,
) -> tuple[_Layout, FirstLine | None]:
    """Return the same for a file of edges: columns head, tail, and perhaps a weight."""
    line, fields = row
    header = None if has_header is False else choice.named_edge(fields)
    if header is not None:
        return _Layout(header, line), _header(path, line, fields, header)
    columns = _in_order(EDGE, len(fields), choice)
    layout = _Layout(columns, line if has_header else 0)
    if has_header:
        return layout, _header(path, line, fields, columns)
    _check_row(path, line, fields, delimiter, layout)
    guess = FirstLine(str(path), line, _clipped(fields), None)
    return layout, None if has_header is False else guess


def _in_order(meant: Sequence[str], count: int, choice: ColumnChoice) -> list[str | None]:
    """Return what the columns of a file without names are: a weight and a time come last."""
    time = [TIME] if choice.time else []
    weight = [WEIGHT] if choice.weights is True and count == len(meant) + 1 + len(time) else []
    return [*meant, *weight, *time]


def _header(path: Path, line: int, fields: list[str], columns: list[str | None]) -> FirstLine:
    fields = _clipped(fields)
    names = {meant: field for meant, field in zip(columns, fields, strict=True) if meant}
    return FirstLine(str(path), line, fields, names)


def _clipped(fields: list[str]) -> list[str]:
    return [field if len(field) <= 40 else f"{field[:37]}..." for field in fields]


def _check_header(path: Path, line: int, fields: list[str], choice: ColumnChoice) -> None:
    """Raise DataError for a header, known by its words, of other than three columns."""
    meant, positions = [role(field) for field in fields], places(fields)
    if len(fields) == 3 or not (set(COLUMNS) <= set(meant) or (len(fields) == 2 and all(meant))):
        return
    header = f"{path}:{line}: this is a header of {len(fields)} columns: {', '.join(fields)}"
    if positions is None:
        raise DataError(f"{header}; {unclear(fields)}. Give three: head, relation and tail")
    extra = [field for place, field in enumerate(fields) if place not in positions]
    names = [fields[place] for place in positions]
    if choice.time and len(extra) == 1:
        raise DataError(
            f"{header}; if {extra[0]!r} has the times, set data.split.time_column {extra[0]}"
        )
    raise DataError(
        f"{header}; triples have three: {', '.join(names)}, and perhaps a weight and a time. "
        f"{', '.join(map(repr, extra))} is left out with data.columns [{', '.join(names)}]"
    )


def _check_row(
    path: Path,
    line: int,
    fields: list[str],
    delimiter: str,
    layout: _Layout,
    hint: bool = False,
) -> None:
    """Raise DataError for a row that does not fit; with ``hint``, say how weights are read."""
    kind, count = "tab" if delimiter == "\t" else "comma", len(layout.columns)
    if len(fields) != count:
        shown = delimiter.join(fields)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        message = (
            f"{path}:{line}: expected {count} {kind}-separated columns ({', '.join(layout.names)}),"
            f" found {len(fields)}: {shown!r}"
        )
        if hint and len(fields) == 4 and _is_weight(fields[3]):
            raise DataError(
                f"{message}; if the last one is a weight, read it with data.weights loss"
            )
        raise DataError(message)
    for column, field in zip(layout.columns, fields, strict=True):
        if column is None:
            continue
        fault = fault_of(field)
        if fault is not None:
            raise DataError(f"{path}:{line}: the {column} {fault}")
        if "\r" in field:
            raise DataError(f"{path}:{line}: carriage return inside the {column}")
        if column == WEIGHT and not _is_weight(field):
            raise DataError(f"{path}:{line}: the weight is no positive, finite number: {field!r}")
        if column == TIME:
            try:
                parse_times(pa.array([field], pa.large_string()))
            except NotATime as error:
                raise DataError(f"{path}:{line}: {error}; this one is {field!r}") from None


def _is_weight(field: str) -> bool:
    try:
        parse_weights(pa.array([field], pa.large_string()))
    except NotAWeight:
        return False
    return True


def _fault(path: Path, delimiter: str, layout: _Layout) -> DataError | None:
    """Return the error of the first faulty row, found by reading the file again row by row."""
    for strict in (False, True):
        try:
            for line, fields in _rows(path, delimiter, strict):
                if line > layout.skip:
                    _check_row(path, line, fields, delimiter, layout)
        except DataError as error:
            return error
    return None
