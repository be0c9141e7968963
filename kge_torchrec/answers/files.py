"""Batch inference: answer a file of queries, or score a file of triples, into another file.

A line has three columns, with ``?`` for the missing part:

    Austria<TAB>borders<TAB>?

In a file of heads a line is a label. A line that cannot be answered is reported with its number;
the other lines are still answered. Rank 0 reads and writes; all ranks search. Only one batch of
lines and its answers are in memory. An output file appears only when it is complete.

Shapes: B lines per batch, k answers per query, M answers or triples.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from kge_torchrec import files
from kge_torchrec.answers.queries import PARTS, Choice, Part, best, splits
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import one_of
from kge_torchrec.data.readers.columns import Columns, is_header
from kge_torchrec.data.readers.fields import batches_of
from kge_torchrec.data.readers.lists import open_list, read_list
from kge_torchrec.data.readers.tables import InMemory, open_memory
from kge_torchrec.data.streams import lines
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.errors import DataError
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.tables import aligned
from kge_torchrec.trained_model import TrainedModel

Found = TypeVar("Found")
Parts = tuple[str | None, ...]  # the labels of head, relation and tail; None for the missing part
# The missing part, which lines of a batch miss it, and the scores and ids of their answers (B, k).
Answered = tuple[Part, np.ndarray, np.ndarray, np.ndarray]

UNKNOWN = "?"
BATCH = 4096  # lines per label lookup
QUERIES = 512  # queries per search
SUGGESTIONS = 20  # unknown labels per file that get close matches, since matching is slow
FORMATS = ("table", "tsv", "json", "parquet")
ROWS = 1 << 16  # rows converted to text at once
TRIPLES = Columns(optional=())  # without weights
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


class Problem(NamedTuple):
    """A line that cannot be answered."""

    line: int  # from 1
    reason: str


class Batch(NamedTuple):
    """A batch of lines that can be answered, and the lines in the same range that cannot."""

    lines: np.ndarray  # (B,) int64, from 1
    ids: np.ndarray  # (B, 3) int64: head, relation, tail; -1 for the missing part
    problems: list[Problem]


@dataclass
class FileReport:
    """Counts of the answered lines, and the lines without an answer."""

    answered: int = 0  # lines
    rows: int = 0  # written
    problems: list[Problem] = field(default_factory=list)  # lines without an answer


def read_triples(source: InMemory | str | Path, model: TrainedModel) -> np.ndarray:
    """Return the ids (T, 3) int64 of triples of labels, from a file or from memory. Collective.

    Raises:
        DataError: A triple is invalid. The message names the first one by its line, or by its
            index from 0 for triples in memory.
    """

    def read() -> np.ndarray:
        if isinstance(source, str | Path):
            place, batches = f"{source}:", list(_from_file(source, model, 0))
        else:
            place, batches = "triples: triple ", list(from_memory("triples", source, model))
        raise_first(batches, place)
        triples = np.concatenate([np.empty((0, 3), np.int64), *(batch.ids for batch in batches)])
        if not len(triples):
            raise DataError("triples: the list is empty")
        return triples

    return on_first_rank(model.processes, read)


def raise_first(batches: Sequence[Batch], place: str) -> None:
    """Raise DataError for the first line that cannot be answered, if there is one."""
    problems = [problem for batch in batches for problem in batch.problems]
    if problems:
        more = f" ({len(problems) - 1:,} more like this)" if len(problems) > 1 else ""
        raise DataError(f"{place}{problems[0].line}: {problems[0].reason}{more}")


def _from_file(
    path: str | Path, model: TrainedModel, missing: int, relation: str | None = None
) -> Iterator[Batch]:
    """Yield the queries or triples of a file; skip empty lines and a header.

    Args:
        path: The file.
        model: The model, for its labels.
        missing: How many of head, relation and tail each line must leave out: 1 for queries, 0
            for triples.
        relation: A relation whose tails are missing; then each line is the label of a head.

    Raises:
        DataError: The file cannot be read, or has no other lines.
    """
    suggestions, is_empty, numbered = SUGGESTIONS, True, lines(Path(path))
    while some := list(islice(numbered, BATCH)):
        parsed: dict[int, Parts] = {}
        problems: list[Problem] = []
        for number, raw in some:
            try:
                parts = _parsed(number, raw, missing, relation)
                if parts is not None:
                    parsed[number] = parts
            except DataError as error:
                problems.append(Problem(number, str(error)))
        batch = _looked_up(model, parsed, suggestions)
        suggestions = max(0, suggestions - len(batch.problems))
        is_empty = is_empty and not (problems or parsed)
        yield batch._replace(problems=sorted(problems + batch.problems))
    if is_empty:
        kind = "queries, such as Austria<tab>borders<tab>?" if missing else "triples"
        kind = kind if relation is None else "one label each"
        raise DataError(f"{path} is empty: write lines of {kind}")


def _parsed(number: int, raw: bytes, missing: int, relation: str | None) -> Parts | None:
    """Return the parts of a line, or None for an empty line or a header; see ``_from_file``."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"invalid UTF-8 ({error.reason})") from error
    columns = text.split("\t")
    if not text.strip() or (number == 1 and is_header(columns)):
        return None
    if relation is not None:
        return text, relation, None
    if len(columns) != 3:
        found = f"found {len(columns)}: {text[:80]!r}"
        raise DataError(f"expected 3 tab-separated columns, {found}")
    parts = tuple(None if column == UNKNOWN else column for column in columns)
    if parts.count(None) != missing:
        rule = "exactly one of head, relation and tail must be ?" if missing else (
            "head, relation and tail are all required"
        )  # fmt: skip
        raise DataError(f"{rule}, {parts.count(None)} are missing")
    return parts


def from_memory(
    name: str, rows: InMemory, model: TrainedModel, columns: Columns = TRIPLES
) -> Iterator[Batch]:
    """Yield batches of triples or queries of labels, numbered from 0.

    Args:
        name: The name of the rows, for messages.
        rows: The rows.
        model: The model, for its labels.
        columns: The columns; of the parts of a triple, those that are not required are missing.
    """
    first = 0
    for block in batches_of(open_memory(name, rows, columns)):
        for start in range(0, block.num_rows, BATCH):
            batch = block.slice(start, BATCH)
            parts = [
                batch[part].to_pylist() if part in columns.required else [None] * batch.num_rows
                for part in PARTS
            ]
            parsed = dict(enumerate(zip(*parts, strict=True), first))
            first += len(parsed)
            yield _looked_up(model, parsed, SUGGESTIONS)


def _looked_up(model: TrainedModel, parsed: Mapping[int, Parts], suggestions: int) -> Batch:
    """Return the lines whose labels are all known; the first problems have close matches."""
    heads, relations, tails = ([parts[i] or "" for parts in parsed.values()] for i in range(3))
    ends = model.entity_labels.search(heads + tails).reshape(2, -1)
    ids = np.stack([ends[0], model.relation_labels.search(relations), ends[1]], 1)
    problems: list[Problem] = []
    for (line, parts), its_ids in zip(parsed.items(), ids.tolist(), strict=True):
        for part, label, number in zip(PARTS, parts, its_ids, strict=True):
            if label is not None and number < 0:
                labels = model.relation_labels if part == "relation" else model.entity_labels
                kind = "relation" if part == "relation" else "entity"
                suggests = len(problems) < suggestions
                reason = str(labels.unknown(label)) if suggests else f"unknown {kind} {label!r}"
                problems.append(Problem(line, reason))
                break
    bad = {problem.line for problem in problems}
    good = np.array([line not in bad for line in parsed], bool)
    is_missing = np.array([[part is None for part in parts] for parts in parsed.values()], bool)
    ids[is_missing.reshape(-1, 3)] = -1
    return Batch(np.array([*parsed], np.int64)[good], ids[good], problems)


def answers_to(model: TrainedModel, batch: Batch, choice: Choice) -> list[Answered]:
    """Return the answers to the queries of a batch, by their missing part. Collective."""
    found = []
    for column, missing in enumerate(PARTS):
        places = np.flatnonzero(batch.ids[:, column] < 0)
        for some in np.array_split(places, range(QUERIES, len(places), QUERIES)):
            if len(some):
                queries = torch.from_numpy(batch.ids[some].clip(0))
                scores, ids = best(model, missing, queries, choice)
                found.append((missing, some, scores.numpy(), ids.numpy()))
    return found


def answer_rows(model: TrainedModel, batch: Batch, found: list[Answered]) -> pa.Table:
    """Return the answers to a batch as rows, in order of line and rank."""
    tables = []
    for missing, some, scores, ids in found:
        query, column = (ids >= 0).nonzero()
        triples = batch.ids[some][query]
        triples[:, PARTS.index(missing)] = ids[query, column]
        table = triple_rows(
            model, batch.lines[some][query], triples, scores[query, column], missing,
            asked=pa.array([missing] * len(query), pa.string()), rank=column + 1,
        )  # fmt: skip
        known = splits(model, missing, batch.ids[some].clip(0), ids)[query, column]
        tables.append(table.append_column("known", pa.array(known, pa.string())))
    return pa.concat_tables(tables).sort_by([("line", "ascending"), ("rank", "ascending")])


def answer_file(
    model: TrainedModel,
    path: str | Path,
    choice: Choice,
    output: str | Path | None = None,
    format: str = "tsv",
    relation: str | None = None,
    names: str | Path | None = None,
) -> FileReport:
    """Answer the queries of a file in order of its lines; see ``Answering.answer_file``.

    With a ``relation``, each line is a head whose tails are missing. The columns are line,
    ``asked``, rank, head, relation, tail, score, probability (only if calibrated) and known (the
    split that holds the triple).
    """

    def search(batch: Batch) -> list[Answered]:
        return answers_to(model, batch, choice)

    def rows(batch: Batch, found: list[Answered]) -> pa.Table:
        return answer_rows(model, batch, found)

    source = _from_file(path, model, 1, relation)
    return _each_batch(model, source, search, rows, format, output, names)


def score_file(
    model: TrainedModel,
    path: str | Path,
    side: Side = "tail",
    output: str | Path | None = None,
    format: str = "tsv",
    names: str | Path | None = None,
) -> FileReport:
    """Score the triples of a file in order of its lines; see ``Answering.score_file``."""

    def search(batch: Batch) -> np.ndarray:
        return model.scores(torch.from_numpy(batch.ids), side).numpy()

    def rows(batch: Batch, scores: np.ndarray) -> pa.Table:
        return triple_rows(model, batch.lines, batch.ids, scores, side)

    return _each_batch(model, _from_file(path, model, 0), search, rows, format, output, names)


def triple_rows(
    model: TrainedModel,
    lines: np.ndarray,
    triples: np.ndarray,
    scores: np.ndarray,
    missing: str,
    **after_line: Any,
) -> pa.Table:
    """Return triples (M, 3) from the lines (M,) of a file with their scores (M,)."""
    vocabularies = model.entity_labels, model.relation_labels, model.entity_labels
    labels: dict[str, Any] = {
        part: vocabulary.take(ids)
        for part, vocabulary, ids in zip(PARTS, vocabularies, triples.T, strict=True)
    }
    columns = {"line": lines, **after_line, **labels, "score": pa.array(scores, pa.float32())}
    if model.calibration is not None:
        found = model.probabilities(scores, missing, triples[:, 1])
        columns["probability"] = pa.array(found, pa.float64())
    return pa.table(columns)


def _each_batch(
    model: TrainedModel,
    source: Iterator[Batch],
    search: Callable[[Batch], Found],
    rows: Callable[[Batch, Found], pa.Table],
    format: str,
    output: str | Path | None,
    names: str | Path | None,
) -> FileReport:
    """Answer the lines of a file and write the answers, batch by batch. Collective.

    All ranks ``search`` the answers of a batch. Rank 0 alone makes ``rows`` of them and writes
    these; all ranks get its errors.
    """
    report, ranks = FileReport(), model.processes
    writers: list[Callable[[pa.Table], int]] = []  # on rank 0 only

    def write(batch: Batch, found: Found) -> int:
        return on_first_rank(ranks, lambda: writers[0](rows(batch, found)))

    shown = nullcontext() if output is None else model.bar(None, "lines answered", "line")
    with ExitStack() as opened, shown as bar:
        on_first_rank(
            ranks,
            lambda: writers.append(opened.enter_context(written(format, output, names))),
        )
        while (batch := on_first_rank(ranks, lambda: next(source, None))) is not None:
            report.problems += batch.problems
            if bar is not None:
                bar.update(len(batch.lines) + len(batch.problems))
            if len(batch.lines):
                report.answered += len(batch.lines)
                report.rows += write(batch, search(batch))
        on_first_rank(ranks, opened.close)
    return report


def record_rows(records: Sequence[Any], kind: type) -> pa.Table:
    """Return instances of a dataclass as rows; drop the column probability if it has no values."""
    names = [field.name for field in fields(kind)]
    columns = {name: pa.array([getattr(record, name) for record in records]) for name in names}
    if "probability" in columns and columns["probability"].null_count == len(records):
        del columns["probability"]
    return pa.table(columns)


def read_names(path: str | Path) -> pa.Table:
    """Return a file of labels and readable names, such as IRIs and titles: columns id and label.

    Raises:
        DataError: The file cannot be read, or has other columns.
    """
    return read_list(open_list(Path(path), Columns(("id", "label"), (), key="")))


def names_by_label(path: str | Path) -> dict[str, str]:
    """Return the readable names of a file by label; raise DataError as ``read_names`` does."""
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
        names: A file of `read_names`, which are written beside the labels.

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
