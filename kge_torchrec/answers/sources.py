"""Queries and triples to answer: lines of a file, lists, and tables such as data frames.

A line has three columns, with ``?`` for the missing part:

    Austria<TAB>borders<TAB>?

In a list of entities a line is a label. A line that cannot be answered is a problem with its
number; the other lines are still answered. A list has labels or ids. The columns of a table have
labels, as for ``prepare``, and are found by their names. Rank 0 reads files for all ranks.

Shapes: B lines or rows per batch, T triples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kge_torchrec.answers.queries import PARTS, Choice, Part, missing_part
from kge_torchrec.config import ConfigError, DataConfig
from kge_torchrec.data.readers.columns import Columns, is_header, role_of
from kge_torchrec.data.readers.fields import batches_of
from kge_torchrec.data.readers.tables import InMemory, open_memory
from kge_torchrec.data.reading import columns_of
from kge_torchrec.data.streams import lines
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.errors import DataError
from kge_torchrec.ranking.candidates import ListedCandidates
from kge_torchrec.trained_model import TrainedModel

Parts = tuple[str | None, ...]  # the labels of head, relation and tail; None for the missing part

UNKNOWN = "?"
BATCH = 4096  # lines per label lookup
SUGGESTIONS = 20  # unknown labels per file that get close matches, since matching is slow
TRIPLES = Columns(optional=())  # without weights


class Problem(NamedTuple):
    """A line that cannot be answered."""

    line: int  # from 1
    reason: str


class Batch(NamedTuple):
    """A batch of lines that can be answered, and the lines in the same range that cannot."""

    lines: np.ndarray  # (B,) int64: lines of a file from 1, or rows from 0
    ids: np.ndarray  # (B, 3) int64: head, relation, tail; -1 for the missing part
    problems: list[Problem]


def read_triples(source: InMemory | str | Path, model: TrainedModel) -> np.ndarray:
    """Return the ids (T, 3) int64 of triples of labels, from a file or from memory. Collective.

    Raises:
        DataError: A triple is invalid. The message names the first one by its line, or by its
            index from 0 for triples in memory.
    """

    def read() -> np.ndarray:
        if isinstance(source, str | Path):
            place, batches = f"{source}:", list(from_file(source, model, 0))
        else:
            place, batches = "triples: triple ", list(_from_memory("triples", source, model))
        _raise_first(batches, place)
        triples = np.concatenate([np.empty((0, 3), np.int64), *(batch.ids for batch in batches)])
        if not len(triples):
            raise DataError("triples: the list is empty")
        return triples

    return on_first_rank(model.processes, read)


def recommended(
    model: TrainedModel, k: int, exclude_known: bool, candidates: str | Path, novelty: float = 0.0
) -> Choice:
    """Return the answers to recommend; see ``Answering.recommend``. Collective."""

    def listed() -> np.ndarray:
        file = Path(candidates)
        if not file.is_file():
            raise DataError(f"candidates must be seen, all or a file of labels: no file {file}")
        batches = list(from_file(file, model, 2))
        _raise_first(batches, f"{file}:")
        return np.concatenate([batch.ids[:, 0] for batch in batches])

    if candidates in ("seen", "all"):
        only = model.candidates(str(candidates))
    else:
        only = ListedCandidates(on_first_rank(model.processes, listed))
    exclude = model.known if exclude_known else None
    return Choice(k, exclude, only, itself=False, novelty=novelty)


def _raise_first(batches: Sequence[Batch], place: str) -> None:
    """Raise DataError for the first line that cannot be answered, if there is one."""
    problems = [problem for batch in batches for problem in batch.problems]
    if problems:
        more = f" ({len(problems) - 1:,} more like this)" if len(problems) > 1 else ""
        raise DataError(f"{place}{problems[0].line}: {problems[0].reason}{more}")


def from_file(path: str | Path, model: TrainedModel, missing: int) -> Iterator[Batch]:
    """Yield the queries, triples or entities of a file; skip empty lines and a header.

    ``missing`` is how many of head, relation and tail each line leaves out: 1 for queries, 0 for
    triples, 2 for entities, which become heads.

    Raises:
        DataError: The file cannot be read, or has no other lines.
    """
    suggestions, is_empty, numbered = SUGGESTIONS, True, lines(Path(path))
    while some := list(islice(numbered, BATCH)):
        parsed: dict[int, Parts] = {}
        problems: list[Problem] = []
        for number, raw in some:
            try:
                parts = _parsed(number, raw, missing)
                if parts is not None:
                    parsed[number] = parts
            except DataError as error:
                problems.append(Problem(number, str(error)))
        batch = _looked_up(model, parsed, suggestions)
        suggestions = max(0, suggestions - len(batch.problems))
        is_empty = is_empty and not (problems or parsed)
        yield batch._replace(problems=sorted(problems + batch.problems))
    if is_empty:
        kinds = "triples", "queries, such as Austria<tab>borders<tab>?", "one label each"
        raise DataError(f"{path} is empty: write lines of {kinds[missing]}")


def _parsed(number: int, raw: bytes, missing: int) -> Parts | None:
    """Return the parts of a line, or None for an empty line or a header; see ``from_file``."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"invalid UTF-8 ({error.reason})") from error
    columns = text.split("\t")
    if not text.strip() or (number == 1 and is_header(columns)):
        return None
    if missing == 2:
        return text, None, None
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


def query_ids(model: TrainedModel, query: Sequence[Any]) -> np.ndarray:
    """Return the ids (B, 3) int64 of head, relation and tail, -1 for the missing part.

    They are of lists of one length, or of single ones for all.
    """
    missing = missing_part(query)
    lengths = {part: len(own) for part, own in zip(PARTS, query, strict=True) if np.ndim(own)}
    if len({*lengths.values()}) > 1:
        sizes = " and ".join(f"{count:,} {part}s" for part, count in lengths.items())
        raise ConfigError(f"lists of a query must have one length, got {sizes}")
    ids = np.full((next(iter(lengths.values()), 1), 3), -1, np.int64)
    for column, (part, own) in enumerate(zip(PARTS, query, strict=True)):
        if part != missing:
            ids[:, column] = (model.relation_ids if part == "relation" else model.entity_ids)(own)
    return ids


def in_batches(ids: np.ndarray) -> Iterator[Batch]:
    """Yield the queries of ids (B, 3)."""
    for start in range(0, len(ids), BATCH):
        some = ids[start : start + BATCH]
        yield Batch(np.arange(start, start + len(some)), some, [])


def queries_in(
    model: TrainedModel, table: Any, relation: Any, tail: Any, missing: Part | None
) -> Iterator[Batch]:
    """Yield the queries of a table, perhaps with one relation for all rows. Collective.

    ``missing`` is the part that is found, whatever columns there are; None: the one without any.
    """
    if np.ndim(relation) or tail is not None:
        raise ConfigError(
            "a table has all queries: beside it only one relation is possible, for all of them"
        )
    columns, names = _columns_of(model), _names(table)
    roles = known = [p for p in PARTS if p != missing and _stands_for(p, names, columns)]
    if relation is None and len(known) == 1:
        relation = columns.constants.get("relation")
    if relation is not None and "relation" not in known:
        label = model.relation_labels.labels([int(model.relation_ids(relation))])[0]
        columns, known = replace(columns, constants={"relation": label}), [*known, "relation"]
    if len(known) != 2:
        raise ConfigError(
            "a table of queries needs columns of two of head, relation and tail, to find the "
            f"third; its columns {', '.join(map(repr, names))} stand for "
            f"{' and '.join(roles) or 'none of them'}"
        )
    return _from_table(model, "queries", table, replace(columns, required=tuple(known)))


def triples_in(model: TrainedModel, table: Any) -> Iterator[Batch]:
    """Yield the triples of a table. Collective."""
    return _from_table(model, "triples", table, _columns_of(model))


def _columns_of(model: TrainedModel) -> Columns:
    """Return the columns that the run's data.columns and data.relation name."""
    exported = model.description.get("data", {})
    return columns_of(DataConfig(**exported) if model.config is None else model.config.data, False)


def _names(table: Any) -> list[str]:
    return [f"{name}" for name in getattr(table, "column_names", table.columns)]


def _stands_for(part: str, names: Sequence[str], columns: Columns) -> bool:
    """Return whether a column is a part of triples, by the config or by its own name."""
    return columns.places.get(part) in names or any(role_of(name) == part for name in names)


def _from_table(model: TrainedModel, name: str, rows: Any, columns: Columns) -> Iterator[Batch]:
    """Yield the batches of a table on every rank. Collective.

    Raises:
        DataError: A label is unknown, or a column is missing.
    """
    names = _names(rows)
    places = {part: at for part, at in columns.places.items() if at in names}
    constants = {} if _stands_for("relation", names, columns) else columns.constants
    columns = Columns(columns.required, (), places=places, constants=constants, key="")
    source = _from_memory(name, rows, model, columns)
    unit = "triple" if name == "triples" else "row"

    def read() -> Batch | None:
        batch = next(source, None)
        if batch is not None:
            _raise_first([batch], f"{name}: {unit} ")
        return batch

    while (batch := on_first_rank(model.processes, read)) is not None:
        yield batch


def _from_memory(
    name: str, rows: InMemory, model: TrainedModel, columns: Columns = TRIPLES
) -> Iterator[Batch]:
    """Yield triples or queries of labels; the parts that ``columns`` doesn't require are missing.

    ``name`` is that of the rows, for messages.
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
