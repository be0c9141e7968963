"""Open sources of triples: files, descriptions of edge files, data sets by name, tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data import SPLITS, TIME, WEIGHT
from kge_torchrec.data.datasets import EMBEDDED, embedded_files, is_named, open_dataset
from kge_torchrec.data.readers import make_reader, open_file
from kge_torchrec.data.readers.columns import TYPES, Columns, parse_columns, parse_kinds
from kge_torchrec.data.readers.description import is_description, read_description
from kge_torchrec.data.readers.fields import Skipped, Table, batches_of
from kge_torchrec.data.readers.files import SUFFIXES, WHOLE, Sources, find_sources
from kge_torchrec.data.readers.label_files import LabelFile, find_labels
from kge_torchrec.data.readers.tables import InMemory, open_memory
from kge_torchrec.data.readers.where import Where
from kge_torchrec.errors import DataError

Batches = Iterator[tuple[str, pa.RecordBatch]]
SAMPLE = 100_000  # rows that hints look at


@dataclass
class Source:
    """Triples that can be read once, and what is noticed on the way.

    Attributes:
        names: The files, or the name of the data set, by split ("whole" without splits).
        files: The files of triples by split; None if there are none.
        ends: The types [head, tail] at the ends of relations, by a description; None without one.
        notes: Where and how something was read that leaves a doubt.
        literals: Triples of RDF that were left out for a literal, by split.
        kinds: The types of ends, and typed: whether labels have a type, such as ``user:17``; both
            are known once files are read.
        labels: The files of labels of "entities" and "relations".
    """

    data: DataConfig
    times: bool
    progress: bool
    names: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[Path]] | None = None
    ends: dict[str, list[list[str]]] | None = None
    notes: list[tuple[str, str]] = field(default_factory=list)
    literals: Counter[str] = field(default_factory=Counter)
    kinds: set[str] = field(default_factory=set)
    typed: bool = False
    labels: dict[str, LabelFile] = field(default_factory=dict)
    _tables: list[tuple[str, Callable[[], Table]]] = field(default_factory=list)
    _where: Where | None = None

    def batches(self) -> Batches:
        """Yield the split and a batch of head, relation, tail, and weight and time if any.

        Raises:
            DataError: Bad input, named by file and line.
        """
        hide = hidden(self.progress)
        with tqdm(desc="read", unit=" triples", unit_scale=True, disable=hide) as bar:
            for split, open_table in self._tables:
                for batch in self._rows(open_table):
                    bar.update(batch.num_rows)
                    yield split, batch

    def report(self) -> dict[str, Any]:
        """Return what a store reports of its sources, once they are read."""
        names = {split: names for split, names in self.names.items() if names}
        return {"sources": names, "reading": self.notes, "literals": dict(self.literals)}

    def _rows(self, open_table: Callable[[], Table]) -> Iterator[pa.RecordBatch]:
        table = open_table()
        if table.skipped is None and self.data.bad_lines == "skip":
            table = table._replace(skipped=Skipped())
        self.notes += table.notes
        kinds = {kind for role, kind in table.columns.constants.items() if role in TYPES}
        self.kinds |= kinds
        self.typed |= bool(kinds or {*table.found.places} & {*TYPES})
        for number, batch in enumerate(batches_of(table, self._where, self.labels)):
            if number == 0:
                self.notes += _hints(table, batch, self.times)
            if self.times and TIME not in batch.schema.names:
                raise DataError(
                    f"{table.source}: a split by time needs a time for each triple; add a column "
                    "named time, timestamp, date or datetime, or name it with data.columns "
                    "time=COLUMN"
                )
            yield batch
        if table.skipped is not None and table.skipped.count:
            said = f"{table.skipped.count:,} bad lines were left out: {table.skipped.first}"
            self.notes.append((table.source, said))

    def _count(self, split: str, number: int) -> None:
        self.literals[split] += number


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
    source, columns = Source(data, times, progress), _columns(data, times)
    if data.where:
        source._where = Where(data.where)
    others = () if source._where is None else source._where.names
    columns = replace(columns, others=others)
    if isinstance(sources, Mapping):
        if set(sources) != {WHOLE} and not set(sources) <= set(SPLITS):
            raise DataError(
                f"splits {sorted(sources)}: give train, and optionally valid and test; or {WHOLE}"
            )
        own = replace(columns, last=(WEIGHT, *([TIME] if times else [])))
        for split in (split for split in (*SPLITS, WHOLE) if split in sources):
            source.names[split] = []
            source._tables.append((split, partial(open_memory, split, sources[split], own)))
        source.labels = find_labels(data, None, source.notes)
        return source
    if is_named(sources):
        tables = open_dataset(str(sources), columns)
        source.names = {split: [str(sources)] for split, _ in tables}
        source._tables = [(split, partial(Table, *table)) for split, table in tables]
        source.labels = find_labels(data, None, source.notes)
        return source
    reader = make_reader(data.reader, data.reader_options)
    files: Files
    is_embedded = sources == EMBEDDED and not Path(EMBEDDED).exists()
    if is_embedded:
        found = embedded_files()
        files = [(split, path, Columns()) for split, paths in found.items() for path in paths]
        data, reader = DataConfig(), None
    elif is_description(sources):
        if data.columns is not None or data.relation is not None:
            raise DataError(
                f"{sources} says what columns are: leave out data.columns and data.relation"
            )
        files, source.ends = _described(sources, data, times)
        source.labels = find_labels(data, None, source.notes)
    else:
        found = find_sources(sources, SUFFIXES if reader is None else reader.suffixes)
        files = [(split, path, columns) for split, paths in found.items() for path in paths]
        source.labels = find_labels(data, files[0][1].parent, source.notes)
    source.files = {}
    for split, path, own in sorted(files, key=lambda file: [*SPLITS, WHOLE].index(file[0])):
        source.files.setdefault(split, []).append(path)
        on_literals = partial(source._count, split) if data.literals == "drop" else None
        own = replace(own, others=others)
        opened = partial(open_file, path, own, data, reader, on_literals)
        source._tables.append((split, opened))
    source.names = {split: [str(path) for path in own] for split, own in source.files.items()}
    if is_embedded:
        source.names = {split: [EMBEDDED] for split in SPLITS}
        source.files = None
    return source


def hidden(progress: bool) -> bool | None:
    """Return tqdm's ``disable``; None looks for a terminal."""
    return None if progress else True


def _columns(data: DataConfig, times: bool) -> Columns:
    """Return the columns of triples by the keys of ``data``."""
    places: dict[str, Any] = {}
    kinds = None
    if data.columns is not None:
        places = parse_columns(data.columns)
    if isinstance(places.get(WEIGHT), Mapping):
        kinds = parse_kinds(places.pop(WEIGHT), "data.columns.weight")
    if kinds is not None and data.relation is not None:
        raise DataError(
            f"data.columns.weight {kinds}: weights of kinds need a column of relations; "
            "leave out data.relation"
        )
    if "relation" in places and data.relation is not None:
        raise DataError("data.relation: data.columns names a column of relations; set one of them")
    constants = {} if data.relation is None else {"relation": data.relation}
    return _as_wanted(Columns(places=places, kinds=kinds, constants=constants), data, times)


def _as_wanted(columns: Columns, data: DataConfig, times: bool) -> Columns:
    """Return the same columns, with those of times and weights that are read."""
    places = {role: at for role, at in columns.places.items() if role != TIME or times}
    last = ([WEIGHT] if data.weights == "loss" else []) + ([TIME] if times else [])
    optional = (WEIGHT, *TYPES, *([TIME] if times else []))
    return replace(columns, places=places, last=tuple(last), optional=optional)


Files = list[tuple[str, Path, Columns]]


def _described(path: Any, data: DataConfig, times: bool) -> tuple[Files, dict[str, Any] | None]:
    """Return the files of a description, and the types at the ends of its relations, if any."""
    files: Files = []
    ends: dict[str, list[Any]] = {}
    typed = False
    for split, file, columns in read_description(path):
        files.append((split, file, _as_wanted(columns, data, times)))
        pair = [columns.constants.get(role) for role in TYPES]
        typed = typed or None not in pair
        relation = columns.constants.get("relation")
        if relation is not None and pair not in ends.setdefault(relation, []):
            ends[relation].append(pair)
    return files, ends if typed else None


def _hints(table: Table, batch: pa.RecordBatch, times: bool) -> list[tuple[str, str]]:
    """Return doubts about what the columns of a table are, by its first rows."""
    hints, found, columns = [], table.found, table.columns
    heads, relations, tails = batch.slice(0, SAMPLE).columns[:3]
    if found.by_order and "relation" not in columns.constants:
        count, other = pc.count_distinct(relations).as_py(), pc.count_distinct(tails).as_py()
        if count >= 10 and other * 4 <= count:
            at = found.places
            hints.append(
                f"the column read as tail has {other:,} values, the one read as relation "
                f"{count:,}, as if columns were head, tail, relation; data.columns "
                f"head={at['head']},tail={at['relation']},relation={at['tail']} reads them so"
            )
    is_typed = {*columns.constants, *found.places} & {*TYPES}
    shared = None if found.one_space or is_typed else _shared_numbers(heads, tails)
    if shared is not None:
        hints.append(
            f"heads and tails share small numbers such as {shared}, which become one entity; if "
            "they are rows of two tables, such as users and items, keep them apart by types: a "
            "description of edge files (YAML) or columns head_type and tail_type"
        )
    if found.times is not None and not times:
        said = f"the column {found.times!r} is not read; data.split.by time or last splits by it"
        hints.append(said)
    return [(table.source, hint) for hint in hints]


def _shared_numbers(heads: pa.Array, tails: pa.Array) -> str | None:
    """Return a number that is among heads and tails which look like numbers of rows, or None."""
    try:
        ends = [pc.unique(column) for column in (heads, tails)]
        numbers = [end.cast(pa.int64()) for end in ends]
    except pa.ArrowInvalid:
        return None
    for end, number in zip(ends, numbers, strict=True):
        is_plain = pc.all(pc.equal(end, number.cast(pa.large_string()))).as_py()
        small = pc.min(number).as_py() >= 0 and pc.max(number).as_py() < 20 * len(number) + 100
        if not (is_plain and small):
            return None
    common = ends[0].filter(pc.is_in(ends[0], value_set=ends[1]))
    return common[0].as_py() if len(common) * 10 >= min(map(len, ends)) else None
