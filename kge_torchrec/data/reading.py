"""Open sources of triples: files, descriptions of edge files, data sets by name, tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data import SPLITS, TIME, WEIGHT
from kge_torchrec.data.datasets import is_named, open_dataset
from kge_torchrec.data.labels import fault_of
from kge_torchrec.data.readers import make_reader, open_file
from kge_torchrec.data.readers.columns import (
    EDGE,
    TYPES,
    Columns,
    given_columns,
    plain,
    role_of,
)
from kge_torchrec.data.readers.description import is_description, read_description
from kge_torchrec.data.readers.fields import Skipped, Table, batches_of
from kge_torchrec.data.readers.files import SUFFIXES, WHOLE, Sources, find_sources
from kge_torchrec.data.readers.lists import LabelFiles, find_labels
from kge_torchrec.data.readers.tables import InMemory, open_memory
from kge_torchrec.data.readers.where import Where
from kge_torchrec.errors import DataError

SAMPLE = 100_000  # rows that hints look at


@dataclass
class Source:
    """Triples that can be read once, and what is noticed on the way."""

    data: DataConfig
    times: bool
    progress: bool
    is_described: bool = False  # whether a description gives the types of ends
    labels: LabelFiles = field(default_factory=dict)
    # Known once files are read:
    notes: list[tuple[str, str]] = field(default_factory=list)  # where, and how it was read
    literals: Counter[str] = field(default_factory=Counter)  # triples that were left out, by split
    typed: bool = False  # whether labels have a type, such as ``user:17``
    # Split ("whole" without splits), name of a file or a data set, and what opens it.
    tables: list[tuple[str, str | None, Callable[[], Table]]] = field(default_factory=list)
    _types_of: dict[str, set[str | None]] = field(default_factory=dict)

    @property
    def splits(self) -> set[str]:
        """The splits that there are, or "whole" alone."""
        return {split for split, *_ in self.tables}

    def batches(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the split and a batch of head, relation, tail, and weight and time if any.

        Raises:
            DataError: Bad input, named by file and line.
        """
        hide = None if self.progress else True  # None looks for a terminal
        order = (*SPLITS, WHOLE)
        with tqdm(desc="read", unit=" triples", unit_scale=True, disable=hide) as bar:
            for split, _, open_table in sorted(self.tables, key=lambda own: order.index(own[0])):
                table = open_table()
                for batch in self._rows(table):
                    bar.update(batch.num_rows)
                    yield split, batch
                if count := sum(table.literals):
                    self.literals[split] += count

    @property
    def entities(self) -> dict[str, str | None]:
        """The type, or None, of the entities in columns, by the name of a column or of the type."""
        return {name: next(iter(own)) for name, own in self._types_of.items() if len(own) == 1}

    def report(self) -> dict[str, Any]:
        """Return what a store reports of its sources, once they are read."""
        names: dict[str, list[str]] = {}
        for split, name, _ in self.tables:
            if name is not None:
                names.setdefault(split, []).append(name)
        return {"sources": names, "reading": self.notes, "literals": dict(self.literals)}

    def _rows(self, table: Table) -> Iterator[pa.RecordBatch]:
        if table.skipped is None and self.data.bad_lines == "skip":
            table = table._replace(skipped=Skipped())
        self.notes += table.notes
        self._notice(table)
        for number, batch in enumerate(batches_of(table, self.labels)):
            if number == 0:
                self.notes += ((table.source, hint) for hint in _hints(table, batch, self.times))
            if self.times and TIME not in batch.schema.names:
                raise DataError(
                    f"{table.source}: a split by time needs a time for each triple; add a column "
                    "named time, timestamp, date or datetime, or name it with data.columns "
                    "time=COLUMN"
                )
            yield batch
        if table.skipped is not None and table.skipped.count:
            self.notes.append((table.source, str(table.skipped)))

    def _notice(self, table: Table) -> None:
        """Remember the types of ends and the names of their columns, which lists may have too."""
        found = table.found
        for end, role in zip(EDGE, TYPES, strict=True):
            kind = found.constants.get(role)
            self.typed |= kind is not None or role in found.places
            names = [] if kind is None else [kind.lower()]
            if found.names is not None and end in found.places and role not in found.places:
                name = found.names[found.places[end]]
                names += [plain(name)] if role_of(name) is None else []
            for name in names:
                self._types_of.setdefault(name, set()).add(kind)


def open_sources(
    sources: Sources | Mapping[str, InMemory],
    data: DataConfig,
    times: bool = False,
    progress: bool = True,
) -> Source:
    """Open the sources of `prepare`; ``times`` says whether the split needs times of triples.

    Raises:
        DataError: There is nothing to read, or names leave open what it is.
    """
    source, columns, folder = Source(data, times, progress), columns_of(data, times), None
    if isinstance(sources, Mapping):
        if set(sources) != {WHOLE} and not set(sources) <= set(SPLITS):
            raise DataError(
                f"splits {sorted(sources)}: give train, and optionally valid and test; or {WHOLE}"
            )
        columns = replace(columns, last=(WEIGHT, *([TIME] if times else [])))
        for split, rows in sources.items():
            source.tables.append((split, None, partial(open_memory, split, rows, columns)))
    elif is_named(sources):
        for split, table in open_dataset(str(sources), columns):
            source.tables.append((split, str(sources), partial(Table, *table)))
    else:
        reader = make_reader(data.reader, data.reader_options)
        if is_description(sources):
            if data.columns is not None or data.relation is not None:
                raise DataError(
                    f"{sources} says what columns are: leave out data.columns and data.relation"
                )
            described = read_description(sources)
            files = [(split, path, _wanted(own, data, times)) for split, path, own in described]
            source.is_described = any(TYPES[0] in own.constants for _, _, own in files)
        else:
            found = find_sources(sources, SUFFIXES if reader is None else reader.suffixes)
            files = [(split, path, columns) for split, paths in found.items() for path in paths]
            folder = files[0][1].parent
        for split, path, own in files:
            opened = partial(open_file, path, own, data, reader)
            source.tables.append((split, str(path), opened))
    source.labels = find_labels(data, folder, source.notes)
    return source


def columns_of(data: DataConfig, times: bool) -> Columns:
    """Return the columns of triples by the keys of ``data``."""
    if data.relation is not None and (fault := fault_of(data.relation)):
        raise DataError(f"data.relation {fault}")
    constants = {} if data.relation is None else {"relation": data.relation}
    places = {} if data.columns is None else data.columns
    return _wanted(given_columns(places, constants), data, times)


def _wanted(columns: Columns, data: DataConfig, times: bool) -> Columns:
    """Return the same columns, with those of times and weights that are read, and a filter."""
    last = {WEIGHT: data.weights == "loss", TIME: times}
    return replace(
        columns,
        places={role: at for role, at in columns.places.items() if role != TIME or times},
        last=tuple(role for role, is_read in last.items() if is_read),
        optional=(WEIGHT, *TYPES, *([TIME] if times else [])),
        where=columns.where or (Where(data.where) if data.where else None),
    )


def _hints(table: Table, batch: pa.RecordBatch, times: bool) -> Iterator[str]:
    """Yield doubts about what the columns of a table are, by its first rows."""
    found = table.found
    heads, relations, tails = batch.slice(0, SAMPLE).columns[:3]
    if found.by_order and "relation" not in found.constants:
        count, other = pc.count_distinct(relations).as_py(), pc.count_distinct(tails).as_py()
        if count >= 10 and other * 4 <= count:
            at = found.places
            yield (
                f"the column read as tail has {other:,} values, the one read as relation "
                f"{count:,}, as if columns were head, tail, relation; data.columns "
                f"head={at['head']},tail={at['relation']},relation={at['tail']} reads them so"
            )
    names = found.names or ()
    ends = [role_of(names[found.places[end]]) for end in EDGE] if names else [*EDGE]
    is_typed = {*found.constants, *found.places} & {*TYPES}
    # Columns such as source and target have one kind of nodes; user_id and item_id have two.
    shared = None if ends == [*EDGE] or is_typed else _shared_numbers(heads, tails)
    if shared is not None:
        yield (
            f"heads and tails share small numbers such as {shared}, which become one entity; if "
            "they are rows of two tables, such as users and items, keep them apart by types: a "
            "description of edge files (YAML) or columns head_type and tail_type"
        )
    unread = [name for name in names if role_of(name) == TIME and TIME not in found.places]
    if unread and not times:
        yield f"the column {unread[0]!r} is not read; data.split.by time or last splits by it"


def _shared_numbers(heads: pa.Array, tails: pa.Array) -> int | None:
    """Return a number that is among heads and tails which look like numbers of rows, or None."""
    try:
        ends = [pc.unique(column.cast(pa.int64())) for column in (heads, tails)]
    except pa.ArrowInvalid:
        return None
    common = ends[0].filter(pc.is_in(ends[0], value_set=ends[1]))
    if not len(common):
        return None
    spans = ((pc.min_max(end).as_py(), len(end)) for end in ends)
    small = all(span["min"] >= 0 and span["max"] < 20 * size + 100 for span, size in spans)
    return common[0].as_py() if small and len(common) * 10 >= min(map(len, ends)) else None
