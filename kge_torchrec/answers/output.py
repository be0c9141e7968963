"""Rows of answers as text or Parquet, printed or in a file that appears when it is complete."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec import files
from kge_torchrec.answers.queries import PARTS
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import one_of
from kge_torchrec.data.readers.columns import Columns
from kge_torchrec.data.readers.lists import open_list, read_list
from kge_torchrec.tables import aligned

FORMATS = ("table", "tsv", "json", "parquet")
ROWS = 1 << 16  # rows converted to text at once
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def record_rows(records: Sequence[Any], kind: type) -> pa.Table:
    """Return instances of a dataclass as rows; drop the column probability if it has no values."""
    names = [field.name for field in fields(kind)]
    columns = {name: pa.array([getattr(record, name) for record in records]) for name in names}
    if "probability" in columns and columns["probability"].null_count == len(records):
        del columns["probability"]
    return pa.table(columns)


def read_names(path: str | Path) -> pa.Table:
    """Return a file of labels and readable names, such as IRIs and titles: columns id and label."""
    return read_list(open_list(Path(path), Columns(("id", "label"), (), key="")))


def names_by_label(path: str | Path) -> dict[str, str]:
    """Return the readable names of a file by label."""
    return dict(zip(*(column.to_pylist() for column in read_names(path)), strict=True))


def _with_names(rows: pa.Table, names: pa.Table) -> pa.Table:
    """Return rows with the names beside each column of labels, empty where there is none."""
    for at, column in reversed([*enumerate(rows.column_names)]):
        if column in (*PARTS, "label"):
            own = pc.index_in(rows[column], value_set=names["id"].combine_chunks())
            own = pc.fill_null(names["label"].take(own), "")
            rows = rows.add_column(at + 1, "name" if column == "label" else f"{column}_name", own)
    return rows


@contextmanager
def written(
    format: str, output: str | Path | None, names: str | Path | None = None
) -> Iterator[Callable[[pa.Table], int]]:
    """Open an output; yield a function that writes a batch of rows and returns their number.

    All batches have the same columns.

    Args:
        format: One of ``FORMATS``.
        output: A file, which appears when the block ends without an error; None: standard output.
        names: A file of labels and readable names, which are written beside the labels.

    Raises:
        ConfigError: The format is unknown, or it needs a file.
        DataError: The file of names cannot be read.
    """
    one_of("format", format, FORMATS)
    if format == "parquet" and output is None:
        raise ConfigError("format parquet needs a file: name one with -o")
    known = None if names is None else read_names(names)
    path: Path | None = None
    parquet: Any = None  # the writer, from the first batch on
    stream, is_first = sys.stdout, True

    def write(rows: pa.Table) -> int:
        nonlocal parquet, is_first
        if known is not None:
            rows = _with_names(rows, known)
        if format == "parquet":
            import pyarrow.parquet as pq  # starts threads

            parquet = parquet or opened.enter_context(pq.ParquetWriter(path, rows.schema))
            parquet.write_table(rows)
            return rows.num_rows
        for start in range(0, max(rows.num_rows, 1), ROWS):
            text = _lines(rows.slice(start, ROWS), format, is_first, width)
            stream.write("".join(f"{line}\n" for line in text))
            is_first = False
        return rows.num_rows

    with ExitStack() as opened:
        if output is not None:
            path = opened.enter_context(files.replacing(Path(output)))
        if path is not None and format != "parquet":
            stream = opened.enter_context(open(path, "w", encoding="utf-8", newline="\n"))
        # Labels are cut to fit a terminal, but not in a file or a pipe.
        width = shutil.get_terminal_size().columns if stream.isatty() else None
        yield write
        if format == "parquet" and parquet is None:  # no batch came, so the columns are unknown
            write(pa.table({}))


def _lines(rows: pa.Table, format: str, with_header: bool, width: int | None) -> list[str]:
    """Return rows as text; labels of a table are cut to ``width`` characters."""
    if format == "json":
        return [json.dumps(row, ensure_ascii=False) for row in rows.to_pylist()]
    number: Callable[[float], str] = repr if format == "tsv" else "{:.4f}".format
    names = rows.column_names
    columns = [_texts(column, number) for column in rows.columns]
    if format == "tsv":
        return ["\t".join(row) for row in [names, *zip(*columns, strict=True)][not with_header :]]
    is_number = [pa.types.is_integer(x) or pa.types.is_floating(x) for x in rows.schema.types]
    # A later batch has the widths of the columns' names too.
    return aligned([names, *zip(*columns, strict=True)], is_number, width)[not with_header :]


def _texts(column: pa.ChunkedArray, number: Callable[[float], str]) -> list[str]:
    """Return each value as the text of one field, with tabs and line ends escaped."""

    def text(value: Any) -> str:
        if isinstance(value, str):
            return value.translate(_ESCAPES)
        if isinstance(value, float):
            return number(value)
        return "" if value is None else f"{value}"

    return [text(value) for value in column.to_pylist()]
