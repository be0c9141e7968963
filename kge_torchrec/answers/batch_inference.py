"""Batch inference: answer a file of queries, or score a file of triples, into another file.

A line has three columns, with ``?`` for the missing part:

    Austria<TAB>borders<TAB>?

In a file of heads a line is a label. A line that cannot
be answered is reported with its number; the other lines are still answered. Rank 0 reads and
writes; all ranks search. Only one batch of lines and its answers are in memory.

Shapes: B lines per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from kge_torchrec.answers.queries import PARTS, Choice, best
from kge_torchrec.answers.tables import answer_rows, check_output, triple_rows, written
from kge_torchrec.data.readers.columns import Columns, is_header
from kge_torchrec.data.readers.fields import batches_of
from kge_torchrec.data.readers.tables import InMemory, open_memory
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.data.streams import lines
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.errors import DataError
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.trained_model import TrainedModel

UNKNOWN = "?"
BATCH = 4096  # lines per label lookup
SUGGESTIONS = 20  # unknown labels per file that get close matches, since matching is slow


class Problem(NamedTuple):
    """A line that cannot be answered."""

    line: int  # from 1
    reason: str


class Questions(NamedTuple):
    """A batch of lines that can be answered."""

    lines: np.ndarray  # (B,) int64, from 1
    ids: np.ndarray  # (B, 3) int64: head, relation, tail; -1 for the missing part
    problems: list[Problem]  # the lines in the same range that cannot


class _Line(NamedTuple):
    number: int
    parts: tuple[str | None, ...]  # head, relation, tail


def read_questions(
    path: str | Path, model: TrainedModel, missing: int, relation: str | None = None
) -> Iterator[Questions]:
    """Yield the queries or triples of a file in batches; skip empty lines and a header.

    Args:
        path: The file.
        model: The model, for its labels.
        missing: How many of head, relation and tail each line must leave out: 1 for queries, 0
            for triples.
        relation: A relation whose tails are missing; then each line is the label of a head.

    Raises:
        DataError: The file cannot be read, or has no other lines.
    """
    suggestions, is_empty = SUGGESTIONS, True
    numbered = lines(Path(path))
    while batch := list(islice(numbered, BATCH)):
        problems: list[Problem] = []
        parsed = list(_parsed(batch, missing, relation, problems))
        ids, unknown = _looked_up(model, parsed, suggestions)
        suggestions = max(0, suggestions - len(unknown))
        bad = {problem.line for problem in unknown}
        good = np.array([line.number not in bad for line in parsed], bool)
        numbers = np.array([line.number for line in parsed], np.int64)
        is_empty = is_empty and not (problems or parsed)
        yield Questions(numbers[good], ids[good], sorted(problems + unknown))
    if is_empty:
        kind = "queries, such as Austria<tab>borders<tab>?" if missing else "triples"
        kind = kind if relation is None else "one label each"
        raise DataError(f"{path} is empty: write lines of {kind}")


def read_triples(source: InMemory | str | Path, model: TrainedModel) -> np.ndarray:
    """Return the ids (T, 3) int64 of triples of labels, from a file or from memory. Collective.

    Raises:
        DataError: A triple is invalid. The message names the first one by its line, or by its
            index from 0 for triples in memory.
    """
    return on_first_rank(model.processes, lambda: _triples(source, model))


def _triples(source: InMemory | str | Path, model: TrainedModel) -> np.ndarray:
    if isinstance(source, str | Path):
        place, batches = f"{source}:", read_questions(source, model, 0)
    else:
        place, batches = "triples: triple ", _in_memory(source, model)
    parts, problems = [np.empty((0, 3), np.int64)], []
    for batch in batches:
        parts.append(batch.ids)
        problems += batch.problems
    if problems:
        more = f" ({len(problems) - 1:,} more like this)" if len(problems) > 1 else ""
        raise DataError(f"{place}{problems[0].line}: {problems[0].reason}{more}")
    triples = np.concatenate(parts)
    if not len(triples):
        raise DataError("triples: the list is empty")
    return triples


def _in_memory(rows: InMemory, model: TrainedModel) -> Iterator[Questions]:
    """Yield batches of triples of labels, numbered from 0."""
    first = 0
    for batch in batches_of(open_memory("triples", rows, Columns(optional=()))):
        columns = zip(*(batch[part].to_pylist() for part in PARTS), strict=True)
        parsed = [_Line(number, parts) for number, parts in enumerate(columns, first)]
        ids, problems = _looked_up(model, parsed, SUGGESTIONS)
        first += len(parsed)
        yield Questions(np.arange(first - len(parsed), first), ids, problems)


def _parsed(
    batch: Sequence[tuple[int, bytes]],
    missing: int,
    relation: str | None,
    problems: list[Problem],
) -> Iterator[_Line]:
    for number, raw in batch:
        try:
            text = raw.decode("utf-8")
            if not text.strip() or (number == 1 and is_header(text.split("\t"))):
                continue
            if relation is not None:
                yield _Line(number, (text, relation, None))
                continue
            fields = text.split("\t")
            if len(fields) != 3:
                found = f"found {len(fields)}: {text[:80]!r}"
                raise DataError(f"expected 3 tab-separated columns, {found}")
            parts = tuple(None if field == UNKNOWN else field for field in fields)
            if parts.count(None) != missing:
                rule = "exactly one of head, relation and tail must be ?" if missing else (
                    "head, relation and tail are all required"
                )  # fmt: skip
                raise DataError(f"{rule}, {parts.count(None)} are missing")
            yield _Line(number, parts)
        except UnicodeDecodeError as error:
            problems.append(Problem(number, f"invalid UTF-8 ({error.reason})"))
        except DataError as error:
            problems.append(Problem(number, str(error)))


def _looked_up(
    model: TrainedModel, parsed: Sequence[_Line], suggestions: int
) -> tuple[np.ndarray, list[Problem]]:
    """Return ids (B, 3), -1 for missing parts, and the lines that have an unknown label."""
    heads, relations, tails = ([line.parts[i] or "" for line in parsed] for i in range(3))
    ends = model.entity_labels.search(heads + tails).reshape(2, -1)
    ids = np.stack([ends[0], model.relation_labels.search(relations), ends[1]], 1)
    problems: list[Problem] = []
    for line, its_ids in zip(parsed, ids.tolist(), strict=True):
        for part, label, number in zip(PARTS, line.parts, its_ids, strict=True):
            if label is not None and number < 0:
                vocabulary = model.relation_labels if part == "relation" else model.entity_labels
                suggests = len(problems) < suggestions
                problems.append(Problem(line.number, _unknown(vocabulary, part, label, suggests)))
                break
    is_present = np.array([[part is not None for part in line.parts] for line in parsed], bool)
    return np.where(is_present.reshape(-1, 3), ids, -1), problems


def _unknown(vocabulary: Vocabulary, part: str, label: str, suggests: bool) -> str:
    if suggests:
        return str(vocabulary.unknown(label))
    return f"unknown {'relation' if part == 'relation' else 'entity'} {label!r}"


QUERIES = 512  # queries per search


@dataclass
class FileReport:
    """Counts of the answered lines, and the lines without an answer."""

    answered: int = 0  # lines
    rows: int = 0  # written
    problems: list[Problem] = field(default_factory=list)  # lines without an answer


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

    With a ``relation``, each line is a head whose tails are missing.
    """

    def rows_of(batch: Questions) -> Callable[[], pa.Table]:
        is_missing, parts = batch.ids < 0, []
        for number, missing in enumerate(PARTS):
            places = np.flatnonzero(is_missing[:, number])
            for some in np.array_split(places, range(QUERIES, len(places), QUERIES)):
                if len(some):
                    queries = batch.ids[some].clip(0)
                    scores, ids = best(model, missing, torch.from_numpy(queries), choice)
                    found = scores.numpy(), ids.numpy()
                    parts.append((missing, queries, found, batch.lines[some]))

        def rows() -> pa.Table:
            tables = pa.concat_tables([answer_rows(model, *part) for part in parts])
            return tables.sort_by([("line", "ascending"), ("rank", "ascending")])

        return rows

    source = read_questions(path, model, 1, relation)
    return _each_batch(model, source, rows_of, (format, output, names))


def score_file(
    model: TrainedModel,
    path: str | Path,
    side: Side = "tail",
    output: str | Path | None = None,
    format: str = "tsv",
    names: str | Path | None = None,
) -> FileReport:
    """Score the triples of a file in order of its lines; see ``Answering.score_file``."""

    def rows_of(batch: Questions) -> Callable[[], pa.Table]:
        scores = model.scores(torch.from_numpy(batch.ids), side).numpy()
        return lambda: triple_rows(model, batch.ids, scores, batch.lines, side)

    return _each_batch(model, read_questions(path, model, 0), rows_of, (format, output, names))


# The format, the file to write and the file of names, as for `tables.written`.
Output = tuple[str, str | Path | None, str | Path | None]


def _each_batch(
    model: TrainedModel,
    source: Iterator[Questions],
    rows_of: Callable[[Questions], Callable[[], pa.Table]],
    output: Output,
) -> FileReport:
    """Answer the lines of a file and write the answers, batch by batch. Collective.

    ``rows_of`` searches the answers of a batch on all ranks. It returns a function that makes the
    rows; only rank 0 calls that function.
    """
    check_output(*output[:2])
    report, ranks = FileReport(), model.processes
    shown = nullcontext() if output[1] is None else model.bar(None, "lines answered", "line")
    with _on_first_rank(ranks, output) as write, shown as bar:
        while (batch := on_first_rank(ranks, lambda: next(source, None))) is not None:
            report.problems += batch.problems
            if bar is not None:
                bar.update(len(batch.lines) + len(batch.problems))
            if len(batch.lines):
                report.answered += len(batch.lines)
                report.rows += write(rows_of(batch))
    return report


@contextmanager
def _on_first_rank(
    ranks: Processes, output: Output
) -> Iterator[Callable[[Callable[[], pa.Table]], int]]:
    """Open ``tables.written`` on rank 0. Collective: all ranks get its errors.

    Yields a function that makes rows and writes them, both on rank 0, and returns their number.
    """
    writers: list[Callable[[pa.Table], None]] = []  # on rank 0 only

    def start() -> None:
        writers.append(opened.enter_context(written(*output)))

    def write(rows: Callable[[], pa.Table]) -> int:
        def make_and_write() -> int:
            made = rows()
            writers[0](made)
            return made.num_rows

        return on_first_rank(ranks, make_and_write)

    with ExitStack() as opened:
        on_first_rank(ranks, start)
        yield write
        on_first_rank(ranks, opened.close)
