"""Bulk inference: the answers to many queries, or the scores of many triples, as rows of a table.

Queries are answered batch by batch. The rows go into a file, as many as fit in memory at a time, or
become one table in memory.

Shapes: B queries of a batch, M rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from kge_torchrec.answers.output import written
from kge_torchrec.answers.queries import PARTS, Choice, answered
from kge_torchrec.answers.sources import Batch, Problem, from_file
from kge_torchrec.config import ConfigError
from kge_torchrec.data import RELATION
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.trained_model import TrainedModel

QUERIES = 512  # queries per search
UNUSED_FACTS = "facts have no effect: no query has an entity of theirs"


@dataclass
class FileReport:
    """Counts of the answered lines, and the lines without an answer."""

    answered: int = 0  # lines
    rows: int = 0  # written
    problems: list[Problem] = field(default_factory=list)  # lines without an answer


def answer_rows(model: TrainedModel, choice: Choice, batch: Batch) -> pa.Table:
    """Return the answers to a batch as rows, in order of line and rank. Collective.

    The columns are line, ``asked``, rank, head, relation, tail, score, probability (only if
    calibrated) and known (the split that holds the triple).
    """
    tables = []
    for column, missing in enumerate(PARTS):
        places = np.flatnonzero(batch.ids[:, column] < 0)
        for start in range(0, len(places), QUERIES):
            some = places[start : start + QUERIES]
            found = answered(model, missing, batch.ids[some], choice)
            asked = pa.array([missing] * len(found.query), pa.string())
            rows = _rows(
                model, batch.lines[some][found.query], found.triples, found.scores, missing,
                asked=asked, rank=found.rank,
            )  # fmt: skip
            tables.append(rows.append_column("known", pa.array(found.known, pa.string())))
    return pa.concat_tables(tables).sort_by([("line", "ascending"), ("rank", "ascending")])


def score_rows(model: TrainedModel, side: Side, batch: Batch) -> pa.Table:
    """Return the triples of a batch with their scores, as queries for a side. Collective."""
    scores = model.scores(torch.from_numpy(batch.ids), side).numpy()
    return _rows(model, batch.lines, batch.ids, scores, side)


def _rows(
    model: TrainedModel,
    lines: np.ndarray,
    triples: np.ndarray,
    scores: np.ndarray,
    missing: str,
    **after_line: Any,
) -> pa.Table:
    """Return triples (M, 3) from some lines (M,) with their scores (M,)."""
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


def answer_file(
    model: TrainedModel,
    path: str | Path,
    choice: Choice,
    output: str | Path | None = None,
    format: str = "tsv",
    relation: str | None = None,
    names: str | Path | None = None,
) -> FileReport:
    """Answer the queries of a file in order of its lines, into another file. Collective.

    Args:
        model: The model.
        path: The queries: head, relation and tail with tabs between, ``?`` for the missing part.
        choice: The answers to list.
        output: See ``written``, as for format and names.
        format: One of ``FORMATS``.
        relation: A relation whose tails are missing; then each line of the file is a head.
        names: A file of readable names.

    Raises:
        DataError: A file cannot be read.
        ConfigError: The model has facts, and no query has an entity of theirs.
        OSError: The answers cannot be written. No output file is left behind.
    """
    source = from_file(path, model, 1 if relation is None else 2)
    if relation is not None:
        source = _asked(source, int(model.relation_ids(relation)))
    return _into_file(model, source, partial(answer_rows, model, choice), format, output, names)


def _asked(heads: Iterator[Batch], relation: int) -> Iterator[Batch]:
    for batch in heads:
        batch.ids[:, RELATION] = relation
        yield batch


def score_file(
    model: TrainedModel,
    path: str | Path,
    side: Side = "tail",
    output: str | Path | None = None,
    format: str = "tsv",
    names: str | Path | None = None,
) -> FileReport:
    """Score the triples of a file, as ``answer_file`` answers queries. Collective."""
    rows_of = partial(score_rows, model, side)
    return _into_file(model, from_file(path, model, 0), rows_of, format, output, names)


def _into_file(
    model: TrainedModel,
    source: Iterator[Batch],
    rows_of: Callable[[Batch], pa.Table],
    format: str,
    output: str | Path | None,
    names: str | Path | None,
) -> FileReport:
    """Write the rows of each batch. Rank 0 reads and writes; all ranks get its errors."""
    report, ranks, uses_facts = FileReport(), model.processes, model.facts is None
    write: list[Callable[[pa.Table], int]] = []  # on rank 0 only
    shown = nullcontext() if output is None else model.bar(None, "lines answered", "line")
    with ExitStack() as opened, shown as bar:
        on_first_rank(
            ranks, lambda: write.append(opened.enter_context(written(format, output, names)))
        )
        while (batch := on_first_rank(ranks, lambda: next(source, None))) is not None:
            report.problems += batch.problems
            if bar is not None:
                bar.update(len(batch.lines) + len(batch.problems))
            if len(batch.lines):
                report.answered += len(batch.lines)
                uses_facts |= bool((batch.ids[:, [0, 2]] >= model.num_entities).any())
                rows = rows_of(batch)
                report.rows += on_first_rank(ranks, partial(lambda rows: write[0](rows), rows))
        if not uses_facts:
            raise ConfigError(UNUSED_FACTS)
        on_first_rank(ranks, opened.close)
    return report


def table_of(
    model: TrainedModel,
    batches: Iterator[Batch],
    rows_of: Callable[[Batch], pa.Table],
    like: Any,
    name: str,
) -> Any:
    """Return the rows of all batches, with the types of entities. Collective.

    If ``like`` is a data frame, so is the result, of its library; otherwise it is a pyarrow table.
    ``name`` is "queries" or "triples", for messages.
    """
    found = [rows_of(batch) for batch in batches]
    if not found:
        raise ConfigError(f"there are no {name}: the list or table is empty")
    rows = pa.concat_tables(found).rename_columns({"line": "row"})
    if "asked" in rows.column_names:
        rows = rows.drop_columns(["asked"])
    if model.ends is not None:
        at = rows.column_names.index("tail") + 1
        for part in ("tail", "head"):
            ids = model.entity_labels.search(rows[part].to_pylist())
            is_new = ids >= model.num_entities  # of facts, which may fit several types
            types = model.ends.type[np.where(is_new, 0, ids)]
            kinds = pa.array(model.ends.names).take(pa.array(types, mask=is_new))
            rows = rows.add_column(at, f"{part}_type", kinds)
    library = type(like).__module__.partition(".")[0]
    if library == "polars":
        return sys.modules["polars"].from_arrow(rows)
    return rows.to_pandas() if library == "pandas" else rows
