"""Columns of a file of triples: head, relation, tail, weight and time, by name or by place."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import COLUMNS, TIME, WEIGHT
from kge_torchrec.errors import DataError

_WEIGHT_WORDS = ("weight", "weights", "confidence", "conf", "certainty", "probability")
_TIME_WORDS = ("time", "timestamp", "date", "datetime")


TYPES = ("head_type", "tail_type")  # columns of the types of entities
EDGE = ("head", "tail")  # the columns of a file of edges


class Edge(NamedTuple):
    """The types of the ends of all edges of a file, and their relation."""

    head: str
    relation: str
    tail: str


class ColumnChoice(NamedTuple):
    """The columns of a file to read.

    Args:
        names: The header's names of head, relation and tail, and of the weight if there is a
            fourth; other columns are left out.  None goes by known words, otherwise by the order.
        weights: True also takes a fourth column without a name as the weight; None takes a column
            that is named so; False takes none.
        edge: The file has edges: a column of heads and one of tails.
        time: The name of the column of times; True goes by known words, or takes the last column
            where there is no header; False leaves a column with a known word out.
    """

    names: tuple[str, ...] | None = None
    weights: bool | None = None
    edge: Edge | None = None
    time: str | bool = False

    @classmethod
    def of(cls, names: Sequence[str] | None, weights: bool | None) -> ColumnChoice:
        """Return a choice; raise DataError unless there are three or four different names."""
        if names is None:
            return cls(None, weights)
        names = tuple(_plain(name) for name in names)
        if len(names) not in (3, 4) or len(set(names)) < len(names) or not all(names):
            raise DataError(
                f"columns {', '.join(names)}: give the names of head, relation and tail, and of "
                "the weight if there is one"
            )
        if len(names) == 4 and weights is False:
            raise DataError(f"columns: {names[3]!r} is the weight, which is not to be read")
        return cls(names, weights)

    def named(self, fields: Sequence[str]) -> list[str | None] | None:
        """Return what each column of a header is; None if the fields are no such header."""
        fields = [_plain(field) for field in fields]
        place = self.time_place(fields)
        if place is not None:
            meant = self.named([*fields[:place], *fields[place + 1 :]])
            return meant and [*meant[:place], TIME if self.time else None, *meant[place:]]
        if self.names is None and all(fields.count(name) == 1 for name in TYPES):
            others = self.named([field for field in fields if field not in TYPES])
            parts = iter(others or ())
            return others and [name if name in TYPES else next(parts) for name in fields]
        if self.names is not None:
            if any(fields.count(name) != 1 for name in self.names):
                return None
            roles_of = dict(zip(self.names, (*COLUMNS, WEIGHT), strict=False))
            return [roles_of.get(field) for field in fields]
        weight = [field for field in fields if is_weight_name(field)]
        if len(fields) == 4 and len(weight) == 1:
            place = fields.index(weight[0])
            order = roles([*fields[:place], *fields[place + 1 :]])
            own = None if self.weights is False else WEIGHT
            return None if order is None else [*order[:place], own, *order[place:]]
        order = roles(fields)
        return [*order] if order else None

    def time_place(self, fields: Sequence[str]) -> int | None:
        """Return the position of the column of times in a header; None if there is none.

        A known word means a time only if other columns are left for the triple.
        """
        times = [self._is_time(_plain(field)) for field in fields]
        others = len(EDGE if self.edge else COLUMNS)
        return times.index(True) if sum(times) == 1 and len(fields) > others else None

    def _is_time(self, field: str) -> bool:
        if isinstance(self.time, str):
            return field == self.time
        return field.lower() in _TIME_WORDS and field not in (self.names or ())

    def check_time(self, source: str, batch: pa.RecordBatch) -> None:
        """Raise DataError if times are needed and a batch of the source has none."""
        if self.time and TIME not in batch.schema.names:
            raise DataError(
                f"{source}: a split by time needs a time for each triple; add a column named "
                f"{', '.join(_TIME_WORDS[:-1])} or {_TIME_WORDS[-1]}, or name the column that has "
                "it with data.split.time_column COLUMN"
            )

    def check_time_column(self, source: str, fields: Sequence[str]) -> None:
        """Raise DataError if a header lacks the column of times that was named, or a relation."""
        ends = [_plain(field) for field in fields if not self._is_time(_plain(field))]
        if self.time and not self.edge and len(fields) == 3 and len(ends) == 2:
            raise DataError(
                f"{source}: {ends[0]!r} and {ends[1]!r} with a time have no relation; name it in a "
                f"YAML file and give that file: edges: [{{file: FILE, head: {ends[0]}, "
                f"relation: NAME, tail: {ends[1]}}}]"
            )
        if isinstance(self.time, str) and self.time_place(fields) is None:
            raise DataError(
                f"{source}: no column {self.time!r} for times, besides those of the triple, among "
                f"{', '.join(map(repr, fields))}"
            )

    def lacking(self, fields: Sequence[str]) -> str:
        """Return why ``named`` found nothing by ``names``, as a clause."""
        fields, names = [_plain(field) for field in fields], self.names or ()
        missing = [name for name in names if name not in fields]
        twice = [name for name in names if fields.count(name) > 1]
        what = f"no column {missing[0]!r}" if missing else f"more than one column {twice[0]!r}"
        return f"{what} among {', '.join(map(repr, fields))}"

    def named_edge(self, fields: Sequence[str]) -> list[str | None] | None:
        """Return what each column of a header of edges is; None if the fields are no header.

        A header has words for head and tail, or the types of the ends, perhaps with ``_id``.
        """
        assert self.edge is not None
        place = self.time_place(fields)
        if place is not None:
            meant = self.named_edge([*fields[:place], *fields[place + 1 :]])
            return meant and [*meant[:place], TIME if self.time else None, *meant[place:]]
        plain = [re.sub("_?id$", "", _plain(field).lower()) for field in fields]
        kinds = [role(field) for field in fields[:2]]
        if kinds != [*EDGE] and plain[:2] != [self.edge.head.lower(), self.edge.tail.lower()]:
            return None
        weighted = len(fields) == 3 and is_weight_name(fields[2]) and self.weights is not False
        return [*EDGE, *([WEIGHT] if weighted else [None] * (len(fields) - 2))]


def with_types(source: str, batch: pa.RecordBatch, edge: Edge | None = None) -> pa.RecordBatch:
    """Return the columns of triples, with labels such as ``user:17`` where types are known.

    Args:
        source: The file, for messages.
        batch: Columns head and tail, and relation or ``edge``; perhaps ``TYPES``, a weight and a
            time.
        edge: What all edges of the file have in common.

    Raises:
        DataError: A type has a colon.
    """
    there = batch.schema.names
    if edge is None and not set(TYPES) <= set(there):
        return batch
    kinds = edge or Edge(batch["head_type"], batch["relation"], batch["tail_type"])
    columns = {}
    for name in EDGE:
        kind = getattr(kinds, name)
        if edge is None and len(colons := kind.filter(pc.match_substring(kind, ":"))):
            raise DataError(f"{source}: the type {colons[0].as_py()!r} has a colon")
        kind = pa.scalar(kind, pa.large_string()) if edge else kind
        colon = pa.scalar(":", pa.large_string())
        columns[name] = pc.binary_join_element_wise(kind, batch[name], colon)
    relation = pa.scalar(edge.relation, pa.large_string()) if edge else None
    columns["relation"] = pa.repeat(relation, len(batch)) if edge else kinds.relation
    names = [*COLUMNS, *(name for name in (WEIGHT, TIME) if name in there)]
    columns |= {name: batch[name] for name in names[3:]}
    return pa.record_batch([columns[name] for name in names], names)


def is_weight_name(field: str) -> bool:
    """Return whether a column name means a weight."""
    return _plain(field).lower() in _WEIGHT_WORDS


def _plain(field: str) -> str:
    """Return a column name without the characters around it that do not matter."""
    return field.strip().lstrip("#:?").strip()


_WORDS = {
    "head": "head h subject subj s source src from head_id subject_id source_id "
    "head_entity entity1 entity_1 e1 node1",
    "relation": "relation rel r predicate pred p property edge edge_type relation_type type label "
    "relation_id predicate_id relationship",
    "tail": "tail t object obj o target dst dest destination to tail_id object_id target_id "
    "tail_entity entity2 entity_2 e2 node2",
}
_ROLES = {word: role for role, words in _WORDS.items() for word in words.split()}


def role(field: str) -> str | None:
    """Return ``head``, ``relation`` or ``tail`` if the column name means one of them, or None.

    Case, surrounding blanks and a leading ``#``, ``:`` or ``?`` do not matter.
    """
    return _ROLES.get(_plain(field).lower())


def roles(fields: Sequence[str]) -> list[str] | None:
    """Return the roles of a header's three fields in file order, or None if this is no header.

    Three fields are a header if each is a word for a different one of head, relation and tail
    (``subject predicate object``, ``h r t``, ``source type target``, ...), in any order.
    """
    in_order = [meant for field in fields if (meant := role(field))]
    return in_order if len(fields) == len(in_order) == 3 and set(in_order) == set(COLUMNS) else None


def places(names: Sequence[str]) -> list[int] | None:
    """Return the positions of head, relation and tail among column names, or None.

    They are the columns with exactly these names; otherwise the only columns that mean them.
    """
    for meant in (names, [role(name) for name in names]):
        if all(meant.count(part) == 1 for part in COLUMNS):
            return [meant.index(part) for part in COLUMNS]
    return None


def unclear(names: Sequence[str]) -> str:
    """Return why ``places`` found none, as a clause."""
    meant = {part: [name for name in names if role(name) == part] for part in COLUMNS}
    for part, columns in meant.items():
        if len(columns) > 1:
            return f"{' and '.join(map(repr, columns))} both stand for the {part}"
    missing = [part for part, columns in meant.items() if not columns]
    return f"no column stands for the {' or the '.join(missing)}"


class FirstLine(NamedTuple):
    """How the first line of a text file was read, or which columns of a Parquet file were read.

    Args:
        file: The file.
        line: Number of the line; None in Parquet.
        fields: The fields of the line, or the names of the columns.
        columns: The file's name of head, relation, tail (weight, time); None: the line is a triple.
    """

    file: str
    line: int | None
    fields: list[str]
    columns: dict[str, str] | None


OnFirstLine = Callable[[FirstLine], object]


class NotAWeight(DataError):
    """A column has a value that is no positive, finite number, first in ``row``."""

    def __init__(self, row: int):
        super().__init__("no positive, finite number")
        self.row = row


def parse_weights(column: pa.Array) -> pa.Array:
    """Return a column of numbers or text as float32.

    Raises:
        NotAWeight: A value is null, no number, or not positive and finite in float32.
    """
    try:
        numbers = column.cast(pa.float64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise NotAWeight(_first_unreadable(column)) from None
    values = numbers.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        weights = values.astype(np.float32)
        good = np.isfinite(weights) & (weights > 0)
    if not good.all():
        raise NotAWeight(int(good.argmin()))
    return pa.array(weights)


class NotATime(DataError):
    """A column has a value that is no time, or another kind of time than before, in ``row``."""

    def __init__(self, row: int):
        super().__init__(
            "a time must be a number or an ISO date (2024-05-31 or 2024-05-31T18:00:00Z), and the "
            "same kind in every row"
        )
        self.row = row


_TIMES = [pa.int64(), pa.float64()]
_TIMES += [pa.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("us", "ns")]


def parse_times(column: pa.Array) -> pa.Array:
    """Return a column of numbers, dates or text as int64, float64 or timestamps.

    Raises:
        NotATime: A value is null, not finite, no time, or of a different kind than those before.
    """
    times = _as_times(column)
    if times is not None:
        return times
    fails = lambda row: _as_times(column[: row + 1]) is None  # noqa: E731
    raise NotATime(bisect_left(range(len(column)), True, key=fails))


def _as_times(column: pa.Array) -> pa.Array | None:
    """Return a column in the first type of times that holds all its values, or None."""
    zone = getattr(column.type, "tz", None)
    if zone is not None:
        column, zone = column.cast(pa.timestamp(column.type.unit, "UTC")), "UTC"
    for kind in _TIMES:
        if pa.types.is_temporal(column.type) and getattr(kind, "tz", "") != zone:
            continue
        try:
            times = column.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
        is_good = pc.is_finite(times) if pa.types.is_floating(kind) else times.is_valid()
        if pc.all(is_good, skip_nulls=False).as_py():
            return times
    return None


def _first_unreadable(column: pa.Array) -> int:
    for row in range(len(column)):
        try:
            parse_weights(column.slice(row, 1)) if len(column) > 1 else column.cast(pa.float64())
        except (NotAWeight, pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return row
    return 0
