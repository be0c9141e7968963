"""Bulk inference in memory: lists and data frames of queries or triples in, a table out.

A list has labels or ids. The columns of a table have labels, as for ``prepare``, and are found by
their names. Queries are answered batch by batch: beside the result, memory holds the scores of one
batch.

Shapes: B queries, M rows of a result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from kge_torchrec.answers.files import (
    BATCH,
    Batch,
    answer_rows,
    answers_to,
    from_memory,
    raise_first,
    triple_rows,
)
from kge_torchrec.answers.queries import PARTS, Choice, Part, missing_part
from kge_torchrec.config import ConfigError
from kge_torchrec.data.readers.columns import Columns, role_of
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.trained_model import TrainedModel

UNUSED_FACTS = "facts have no effect: no query has an entity of theirs"


def is_table(value: Any) -> bool:
    """Return whether a value is an Arrow table or a data frame, such as of pandas or polars."""
    return hasattr(value, "__arrow_c_stream__") and hasattr(value, "columns")


def is_many(value: Any) -> bool:
    """Return whether a value is a table, or a list or an array of labels or ids."""
    return is_table(value) or (value is not None and np.ndim(value) > 0)


def answer_table(
    model: TrainedModel,
    parts: Mapping[str, Any],
    choice: Choice,
    columns: Columns,
    missing: Part | None = None,
) -> Any:
    """Return the answers to queries as a table; see ``Answering.predict``. Collective.

    Args:
        model: The model.
        parts: Head, relation and tail: a label or an id, many, or None for the missing part. A
            table as the head has the parts that its columns stand for.
        choice: The answers to list.
        columns: The columns of the triples that the run was trained on.
        missing: The part that is found, whatever columns a table has. None: the one without any.
    """
    source = next(value for value in parts.values() if is_many(value))
    if is_table(parts["head"]):
        batches = _queries_in(model, parts, columns, missing)
    else:
        batches = _queries_of(model, parts)
    found, uses_facts = [], model.facts is None
    for batch in batches:
        uses_facts |= bool((batch.ids[:, [0, 2]] >= model.num_entities).any())
        found.append(answer_rows(model, batch, answers_to(model, batch, choice)))
    if not uses_facts:
        raise ConfigError(UNUSED_FACTS)
    return _result(model, source, found, "queries")


def score_table(model: TrainedModel, triples: Any, side: Side, columns: Columns) -> Any:
    """Return the scores of a table of triples as a table; see ``Answering.score``. Collective."""
    found = []
    for batch in _batches(model, "triples", triples, columns):
        scores = model.scores(torch.from_numpy(batch.ids), side).numpy()
        found.append(triple_rows(model, batch.lines, batch.ids, scores, side))
    return _result(model, triples, found, "triples")


def _queries_of(model: TrainedModel, parts: Mapping[str, Any]) -> Iterator[Batch]:
    """Yield batches of queries whose parts are lists of one length, or single ones for all."""
    missing = missing_part([parts[part] for part in PARTS])
    lengths = {part: len(parts[part]) for part in PARTS if is_many(parts[part])}
    if len({*lengths.values()}) > 1:
        sizes = " and ".join(f"{count:,} {part}s" for part, count in lengths.items())
        raise ConfigError(f"lists of a query must have one length, got {sizes}")
    ids = np.full((next(iter(lengths.values())), 3), -1, np.int64)
    for column, part in enumerate(PARTS):
        if part != missing:
            ids_of = model.relation_ids if part == "relation" else model.entity_ids
            ids[:, column] = ids_of(parts[part])
    for start in range(0, len(ids), BATCH):
        some = ids[start : start + BATCH]
        yield Batch(np.arange(start, start + len(some)), some, [])


def _queries_in(
    model: TrainedModel, parts: Mapping[str, Any], columns: Columns, missing: Part | None
) -> Iterator[Batch]:
    """Return the queries in a table, to which ``parts`` may add one relation for all."""
    table, relation = parts["head"], parts["relation"]
    if is_many(relation) or parts["tail"] is not None:
        raise ConfigError(
            "a table has all queries: beside it only one relation is possible, for all of them"
        )
    names = _names(table)
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
    return _batches(model, "queries", table, replace(columns, required=tuple(known)))


def _names(table: Any) -> list[str]:
    return [f"{name}" for name in getattr(table, "column_names", table.columns)]


def _stands_for(part: str, names: Sequence[str], columns: Columns) -> bool:
    """Return whether a column is a part of triples, by the config or by its own name."""
    return columns.places.get(part) in names or any(role_of(name) == part for name in names)


def _batches(model: TrainedModel, name: str, rows: Any, columns: Columns) -> Iterator[Batch]:
    """Yield the batches of a table on every rank; rank 0 reads it. Collective.

    Raises:
        DataError: A label is unknown, or a column is missing.
    """
    names = _names(rows)
    places = {part: at for part, at in columns.places.items() if at in names}
    constants = {} if _stands_for("relation", names, columns) else columns.constants
    columns = Columns(columns.required, (), places=places, constants=constants, key="")
    source, unit = from_memory(name, rows, model, columns), "triple" if name == "triples" else "row"

    def read() -> Batch | None:
        batch = next(source, None)
        if batch is not None:
            raise_first([batch], f"{name}: {unit} ")
        return batch

    while (batch := on_first_rank(model.processes, read)) is not None:
        yield batch


def _result(model: TrainedModel, source: Any, found: list[pa.Table], name: str) -> Any:
    """Return rows with the types of entities, as a data frame of the library of ``source``."""
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
            types = model.ends.types_of(np.where(is_new, 0, ids))
            kinds = pa.array(model.ends.names).take(pa.array(types, mask=is_new))
            rows = rows.add_column(at, f"{part}_type", kinds)
    library = type(source).__module__.partition(".")[0]
    if library == "polars":
        return sys.modules["polars"].from_arrow(rows)
    return rows.to_pandas() if library == "pandas" else rows
