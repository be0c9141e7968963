"""Batch inference: answer a file of queries, or score a file of triples, into another file.

Rank 0 reads and writes; all ranks search. Only one batch of lines and its answers are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import torch

from kge_torchrec.answers.predictions import PARTS, Choice, find
from kge_torchrec.answers.questions import Problem, Questions, read_questions
from kge_torchrec.answers.tables import answer_rows, check_output, triple_rows, written
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.trained_model import TrainedModel

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
) -> FileReport:
    """Answer the queries of a file in order of its lines.

    Args:
        model: The model.
        path: The queries; see ``questions``.
        choice: Which candidates are answers.
        output: The file to write, with the columns of ``answer_rows``; None prints.
        format: One of ``tables.FORMATS``.

    Returns:
        A report, which includes the lines that cannot be answered.

    Raises:
        DataError: The file cannot be read.
        ConfigError: The format is unknown, or cannot be printed.
    """

    def rows_of(batch: Questions) -> Callable[[], pa.Table]:
        is_missing, parts = batch.ids < 0, []
        for number, missing in enumerate(PARTS):
            places = np.flatnonzero(is_missing[:, number])
            for some in np.array_split(places, range(QUERIES, len(places), QUERIES)):
                if len(some):
                    queries = batch.ids[some].clip(0)
                    results = find(model, missing, torch.from_numpy(queries), choice)
                    parts.append((missing, queries, results, batch.lines[some]))

        def rows() -> pa.Table:
            tables = pa.concat_tables([answer_rows(model, *part) for part in parts])
            return tables.sort_by([("line", "ascending"), ("rank", "ascending")])

        return rows

    return _each_batch(model, path, 1, rows_of, output, format)


def score_file(
    model: TrainedModel,
    path: str | Path,
    side: Side = "tail",
    output: str | Path | None = None,
    format: str = "tsv",
) -> FileReport:
    """Score the triples of a file in order of its lines.

    The columns of the output are those of ``triple_rows``. The report and the errors are those of
    ``answer_file``.

    Args:
        model: As for ``answer_file``.
        path: As for ``answer_file``.
        side: The side of the queries that score the triples.
        output: As for ``answer_file``.
        format: As for ``answer_file``.
    """

    def rows_of(batch: Questions) -> Callable[[], pa.Table]:
        scores = model.scores(torch.from_numpy(batch.ids), side).numpy()
        return lambda: triple_rows(model, batch.ids, scores, batch.lines, side)

    return _each_batch(model, path, 0, rows_of, output, format)


def _each_batch(
    model: TrainedModel,
    path: str | Path,
    missing: int,
    rows_of: Callable[[Questions], Callable[[], pa.Table]],
    output: str | Path | None,
    format: str,
) -> FileReport:
    """Read, answer and write a file batch by batch. Collective.

    Args:
        model: As for ``answer_file``.
        path: As for ``answer_file``.
        missing: How many parts each line must leave out.
        rows_of: Searches the answers of a batch on all ranks. It returns a function that makes the
            rows; only rank 0 calls that function.
        output: As for ``answer_file``.
        format: As for ``answer_file``.
    """
    check_output(format, output)
    report, ranks = FileReport(), model.processes
    source = read_questions(path, model, missing)
    shown = nullcontext() if output is None else model.bar(None, "lines answered", "line")
    with FirstRankOutput(ranks, format, output) as target, shown as bar:
        for batch in _on_all_ranks(ranks, source):
            report.problems += batch.problems
            if bar is not None:
                bar.update(len(batch.lines) + len(batch.problems))
            if len(batch.lines):
                report.answered += len(batch.lines)
                report.rows += target.write(rows_of(batch))
    return report


def _on_all_ranks(ranks: Processes, source: Iterator[Questions]) -> Iterator[Questions]:
    """Yield the batches that rank 0 reads, on every rank."""
    while (batch := on_first_rank(ranks, lambda: next(source, None))) is not None:
        yield batch


class FirstRankOutput:
    """The output of ``tables.written``, held by rank 0. Collective: all ranks get its errors."""

    def __init__(self, ranks: Processes, format: str, output: str | Path | None):
        self._ranks, self._format, self._output = ranks, format, output
        self._open = ExitStack()

    def __enter__(self) -> FirstRankOutput:
        on_first_rank(self._ranks, self._start)
        return self

    def _start(self) -> None:
        self._write = self._open.enter_context(written(self._format, self._output))

    def write(self, rows: Callable[[], pa.Table]) -> int:
        """Make the rows and write them, both on rank 0; return their number on every rank."""

        def make_and_write() -> int:
            made = rows()
            self._write(made)
            return made.num_rows

        return on_first_rank(self._ranks, make_and_write)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            on_first_rank(self._ranks, self._open.close)
        else:
            self._open.__exit__(kind, error, traceback)
