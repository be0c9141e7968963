"""Answers as table rows, written as an aligned table, TSV, JSON lines or Parquet.

Rows are written batch by batch. An output file appears only when it is complete.

Shapes: B queries, M answers or triples.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec import files
from kge_torchrec.answers.queries import PARTS, Part, splits
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import one_of
from kge_torchrec.data.readers.columns import Columns
from kge_torchrec.data.readers.lists import open_list, read_list
from kge_torchrec.trained_model import TrainedModel

FORMATS = ("table", "tsv", "json", "parquet")
ROWS = 1 << 16  # rows converted to text at once
SHORTEST = 8  # the smallest width of a label column, in characters
ELLIPSIS = "\u2026"
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}


def answer_rows(
    model: TrainedModel,
    missing: Part,
    queries: np.ndarray,
    found: tuple[np.ndarray, np.ndarray],
    lines: np.ndarray,
) -> pa.Table:
    """Return the answers to B queries from the lines (B,) of a file as completed triples.

    The columns are line, ``asked``, rank, head, relation, tail, score, probability (only if
    calibrated) and known (only with data: the split that holds the triple).

    Args:
        model: The model.
        missing: The part that the queries miss.
        queries: (B, 3).
        found: The scores (B, k) and ids (B, k) of the answers; -1 is none.
        lines: (B,).
    """
    scores, ids = found
    is_listed = ids >= 0
    query, column = is_listed.nonzero()
    triples = queries[query].copy()
    triples[:, PARTS.index(missing)] = ids[is_listed]
    columns = {
        "line": lines[query],
        "asked": pa.array([missing] * len(triples), pa.string()),
        "rank": column + 1,
        **_labels(model, triples),
        **_scores(model, scores[is_listed], missing),
    }
    if model.store is not None:
        known = splits(model, missing, queries, ids)[is_listed]
        columns["known"] = pa.array(known, pa.string())
    return pa.table(columns)


def triple_rows(
    model: TrainedModel, triples: np.ndarray, scores: np.ndarray, lines: np.ndarray, side: str
) -> pa.Table:
    """Return triples (M, 3) from the lines (M,) of a file with their scores (M,) as rows.

    The columns are line, head, relation, tail, score and probability (only if calibrated).
    """
    labels = _labels(model, triples)
    return pa.table({"line": lines, **labels, **_scores(model, scores, side)})


def record_rows(records: Sequence[Any], kind: type) -> pa.Table:
    """Return instances of a dataclass as rows; drop the column probability if it has no values."""
    names = [field.name for field in fields(kind)]
    columns = {name: pa.array([getattr(record, name) for record in records]) for name in names}
    if "probability" in columns and columns["probability"].null_count == len(records):
        del columns["probability"]
    return pa.table(columns)


def _labels(model: TrainedModel, triples: np.ndarray) -> dict[str, pa.Array]:
    vocabularies = model.entity_labels, model.relation_labels, model.entity_labels
    return {
        part: vocabulary.array.take(pa.array(ids))
        for part, vocabulary, ids in zip(PARTS, vocabularies, triples.T, strict=True)
    }


def _scores(model: TrainedModel, scores: np.ndarray, missing: str) -> dict[str, Any]:
    columns = {"score": pa.array(scores, pa.float32())}
    if model.calibration is not None:
        columns["probability"] = pa.array(model.probabilities(scores, missing), pa.float64())
    return columns


def read_names(path: str | Path) -> pa.Table:
    """Return a file of labels and readable names, such as IRIs and titles: columns id and label.

    Raises:
        DataError: The file cannot be read, or has other columns.
    """
    return read_list(open_list(Path(path), Columns(("id", "label"), (), key="")))


def names_by_label(path: str | Path) -> dict[str, str]:
    """Return the readable names of a file by label; raise DataError as ``read_names`` does."""
    return dict(zip(*(column.to_pylist() for column in read_names(path)), strict=True))


def with_names(rows: pa.Table, names: pa.Table) -> pa.Table:
    """Return rows with the names beside each column of labels, empty where there is none."""
    for at, column in reversed([*enumerate(rows.column_names)]):
        if column in (*PARTS, "label"):
            own = pc.index_in(rows[column], value_set=names["id"].combine_chunks())
            own = pc.fill_null(names["label"].take(own), "")
            rows = rows.add_column(at + 1, "name" if column == "label" else f"{column}_name", own)
    return rows


def check_output(format: str, output: str | Path | None) -> None:
    """Raise ConfigError for an unknown format, or one that needs a file (``output`` not None)."""
    one_of("format", format, FORMATS)
    if format == "parquet" and output is None:
        raise ConfigError("format parquet needs a file: name one with -o")


@contextmanager
def written(
    format: str, output: str | Path | None, names: str | Path | None = None
) -> Iterator[Callable[[pa.Table], None]]:
    """Open an output and yield a function that writes a batch of rows, always the same columns.

    Args:
        format: One of ``FORMATS``.
        output: A file, which appears when the block ends without an error; None: standard output.
        names: A file of `read_names`, which are written beside the labels.
    """
    if names is not None:
        known = read_names(names)
        with written(format, output) as write:
            yield lambda rows: write(with_names(rows, known))
        return
    if output is None:
        yield _text_writer(format, sys.stdout)
        return
    with files.replacing(Path(output)) as hidden:
        if format == "parquet":
            with _parquet_writer(hidden) as write:
                yield write
        else:
            with open(hidden, "w", encoding="utf-8", newline="\n") as stream:
                yield _text_writer(format, stream)


@contextmanager
def _parquet_writer(path: Path) -> Iterator[Callable[[pa.Table], None]]:
    import pyarrow.parquet as pq

    writer: pq.ParquetWriter | None = None

    def write(rows: pa.Table) -> None:
        nonlocal writer
        if writer is None:
            writer = opened.enter_context(pq.ParquetWriter(path, rows.schema))
        writer.write_table(rows)

    with ExitStack() as opened:
        yield write
        if writer is None:  # no batch came, so the columns are unknown
            write(pa.table({}))


def _text_writer(format: str, stream: IO[str]) -> Callable[[pa.Table], None]:
    # Labels are cut to fit a terminal, but not in a file or a pipe.
    width = shutil.get_terminal_size().columns if stream.isatty() else None
    aligned = partial(_aligned, width=width)
    forms: dict[str, Callable[[pa.Table, bool], str]]
    forms = {"table": aligned, "tsv": _separated, "json": _objects}
    to_text, first = forms[format], True

    def write(rows: pa.Table) -> None:
        nonlocal first
        for start in range(0, max(rows.num_rows, 1), ROWS):
            stream.write(to_text(rows.slice(start, ROWS), first))
            first = False

    return write


def _separated(rows: pa.Table, with_header: bool) -> str:
    columns = [_texts(column.to_pylist(), repr) for column in rows.columns]
    lines = ["\t".join(rows.column_names)] if with_header else []
    lines += ["\t".join(row) for row in zip(*columns, strict=True)]
    return "".join(f"{line}\n" for line in lines)


def _objects(rows: pa.Table, with_header: bool) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.to_pylist())


def _aligned(rows: pa.Table, with_header: bool, width: int | None = None) -> str:
    """Return rows as aligned columns; labels are cut to ``width`` characters, the widest first."""
    columns = [_texts(column.to_pylist(), "{:.4f}".format) for column in rows.columns]
    names = rows.column_names
    widths = [max(map(len, [name, *column])) for name, column in zip(names, columns, strict=True)]
    is_text = [not (pa.types.is_integer(x) or pa.types.is_floating(x)) for x in rows.schema.types]
    while width is not None and sum(widths) + 2 * len(widths) - 2 > width:
        longest = max((w, i) for i, w in enumerate(widths) if is_text[i])[1]
        if widths[longest] <= SHORTEST:
            break
        widths[longest] -= 1

    def line(fields: tuple[str, ...] | list[str]) -> str:
        cells = zip(fields, widths, is_text, strict=True)
        return "  ".join(
            f"{x if len(x) <= w else x[: w - 1] + ELLIPSIS:<{w}}" if text else f"{x:>{w}}"
            for x, w, text in cells
        ).rstrip()

    lines = [line(names)] if with_header else []
    lines += [line(row) for row in zip(*columns, strict=True)]
    return "".join(f"{text}\n" for text in lines)


def _texts(values: list[Any], number: Callable[[float], str]) -> list[str]:
    """Return each value as the text of one field, with tabs and line ends escaped."""

    def text(value: Any) -> str:
        if isinstance(value, str):
            return "".join(_ESCAPES.get(letter, letter) for letter in value)
        if isinstance(value, float):
            return number(value)
        return "" if value is None else f"{value}"

    return [text(value) for value in values]
