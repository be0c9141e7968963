"""Turn the fields of a table into labels, weights and times; an error names the row of a bad one.

Shapes: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import TIME, WEIGHT
from kge_torchrec.data.labels import fault_of, faulty
from kge_torchrec.data.readers.columns import Columns, Found
from kge_torchrec.errors import DataError

TEXT = pa.large_string()
_TEXTS = pa.types.is_string, pa.types.is_string_view, pa.types.is_binary, pa.types.is_large_binary
_TIMES = pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC")

# Columns (B,) by position, and what names a row, such as "visits.csv:17".
Block: TypeAlias = tuple[dict[int, pa.Array], Callable[[int], str]]


class Table(NamedTuple):
    """An opened table."""

    source: str  # its name in messages
    columns: Columns
    found: Found
    blocks: Iterator[Block]
    notes: Sequence[tuple[str, str]] = ()  # where and how it was read, where that was a guess
    header: Mapping[int, str] = {}  # the names of the columns, if rows may be the header again
    skipped: Skipped | None = None  # counts bad rows, which are left out; None: an error
    literals: Sequence[int] = ()  # numbers of triples of RDF left out, once the rows are read


def place_among(place: Callable[[int], str], rows: np.ndarray) -> Callable[[int], str]:
    """Return what names a row among some rows of a block."""
    return lambda row: place(int(rows[row]))


def no_rows(source: object, columns: Columns) -> DataError:
    """Return the error for a file without rows."""
    what = "triples" if columns.of_triples else "rows"
    return DataError(f"{source}: empty file: no {what}; fill it, name another or leave it out")


class Skipped:
    """The bad rows of a file that are left out: their number, and three of them."""

    def __init__(self) -> None:
        self.count = 0
        self._said: list[str] = []

    def add(self, count: int, reason: Callable[[int], str]) -> None:
        """Count rows; ``reason`` returns what is wrong with one, by its number."""
        self.count += count
        self._said += [reason(row) for row in range(min(count, 3 - len(self._said)))]

    def __str__(self) -> str:
        return f"{self.count:,} bad lines were left out: {'; '.join(self._said)}"


def batches_of(table: Table, labels: Mapping[str, Any] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the required columns as large_string, and weight and time where there are some.

    Weights are float32; times are float64, or microseconds in UTC.  Ids of "entities" and
    "relations" get the ``labels`` of a `LabelFile`.

    Raises:
        DataError: A field is no label, no weight or no time.
    """
    columns, found = table.columns, table.found
    for block in table.blocks:
        rows = _Rows(block, table)
        if columns.where is not None:
            values = {name: rows.columns[at] for name, at in found.others.items()}
            rows.keep(columns.where(values))
        rows.columns = {role: rows.columns[at] for role, at in found.places.items()}
        for role in [role for role in rows.columns if role not in (WEIGHT, TIME)]:
            rows.make_labels(role)
        if columns.kinds is not None:
            rows.weigh(columns.kinds)
        elif WEIGHT in rows.columns:
            rows.make_weights()
        if TIME in rows.columns:
            rows.make_times()
        for role in [r for r in ("head", "relation", "tail", "entity") if r in rows.columns]:
            file = (labels or {}).get("relations" if role == "relation" else "entities")
            if file is not None:
                rows.name(role, file)
            rows.add_type(role, found.constants.get(f"{role}_type"))
        if "relation" in found.constants:
            relation = pa.scalar(found.constants["relation"], TEXT)
            rows.columns["relation"] = pa.repeat(relation, len(next(iter(rows.columns.values()))))
        names = [*columns.required, *(n for n in (WEIGHT, TIME) if n in rows.columns)]
        yield pa.record_batch([rows.columns[name] for name in names], names)


class _Rows:
    """The rows of a block that are left, first by position and then by role."""

    def __init__(self, block: Block, table: Table):
        self.columns: dict[Any, pa.Array] = dict(block[0])
        self._place, self._skipped = block[1], table.skipped
        self._is_edge = table.columns.of_triples
        again = [pc.equal(self.columns[at], name) for at, name in table.header.items()]
        if again:
            said = "the header again, as in two files in one"
            self.refuse(reduce(pc.and_, again), lambda _: said)

    def keep(self, mask: pa.Array) -> None:
        """Leave out the rows that a mask (B,) of booleans does not have."""
        if pc.all(mask).as_py() is False:
            rows = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
            self._place = place_among(self._place, rows)
            self.columns = {key: column.filter(mask) for key, column in self.columns.items()}

    def refuse(
        self, bad: pa.Array, reason: Callable[[Any], str], fields: pa.Array | None = None
    ) -> None:
        """Leave out and count the rows that a mask (B,) has, or raise DataError for the first.

        ``reason`` returns what is wrong, by the field of ``fields`` (B,) in that row.
        """
        rows = np.flatnonzero(bad.to_numpy(zero_copy_only=False))
        if not len(rows):
            return
        place = self._place

        def said(position: int) -> str:
            row = int(rows[position])
            return f"{place(row)}: {reason(None if fields is None else fields[row].as_py())}"

        if self._skipped is None:
            raise DataError(said(0))
        self._skipped.add(len(rows), said)
        self.keep(pc.invert(bad))

    def make_labels(self, role: str) -> None:
        """Make large_string of a column; refuse rows whose text can be no label."""
        column = self.columns[role]
        if not pa.types.is_large_string(column.type):
            column = self.columns[role] = self._as_text(role, column)
        text = pc.fill_null(column, "")
        self.refuse(faulty(text), lambda label: f"the {role} {fault_of(label)}", text)

    def _as_text(self, role: str, column: pa.Array) -> pa.Array:
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if pa.types.is_floating(kind):
            raise DataError(
                f"{self._place(0)}: the {role} is a number with a fraction ({kind}), as ids become "
                "where one is missing; make the column integers or text"
            )
        if (text := _cast(column, TEXT)) is not None:
            return text
        bad = next(row for row in range(len(column)) if _cast(column[row : row + 1], TEXT) is None)
        is_text = any(is_kind(kind) for is_kind in _TEXTS)
        what = "not UTF-8; convert it" if is_text else f"no text ({kind})"
        raise DataError(f"{self._place(bad)}: the {role} is {what}")

    def name(self, role: str, file: Any) -> None:
        """Put the labels of a file in the place of ids."""
        ids = self.columns[role]
        self.columns[role], unknown = file.labels_of(ids)
        self.refuse(unknown, lambda id: f"the {role} {id!r} is no id of {file.path}", ids)

    def add_type(self, role: str, kind: str | None) -> None:
        """Make labels such as "user:17" of ids, by a type or by a column of types."""
        if (name := f"{role}_type") in self.columns:
            colons = pc.match_substring(self.columns[name], ":")
            self.refuse(colons, lambda _: f"the {name} has a colon, which ends the type")
        elif kind is None:
            return
        kinds = self.columns.get(name, pa.scalar(kind, TEXT))
        colon = pa.scalar(":", TEXT)
        self.columns[role] = pc.binary_join_element_wise(kinds, self.columns[role], colon)

    def weigh(self, kinds: Mapping[str, float]) -> None:
        """Give each row the weight of its relation."""
        relations = self.columns["relation"]
        own = pc.index_in(relations, value_set=pa.array([*kinds], TEXT))
        self.columns[WEIGHT] = pa.array([*kinds.values()], pa.float32()).take(own)
        self.refuse(
            own.is_null(),
            lambda relation: (
                f"the relation {relation!r} has no weight; those with one are {', '.join(kinds)}; "
                "give it one, or leave such rows out with data.where"
            ),
            relations,
        )

    def make_weights(self) -> None:
        """Make float32 of the weights; refuse rows whose weight is not positive and finite."""
        column = self.columns[WEIGHT]
        values = _parsed(column, pa.float64()).to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            weights = values.astype(np.float32)
            good = np.isfinite(weights) & (weights > 0)
        self.columns[WEIGHT] = pa.array(weights)

        def reason(field: Any) -> str:
            if self._is_edge and (_parsed(pa.array([field]), pa.float64())[0].as_py() or 0) < 0:
                return (
                    f"the weight {field} is negative, a signed edge; give positive and negative "
                    "edges a relation each, or leave the column out by naming others with "
                    "data.columns"
                )
            comma = "; write a decimal point" if "," in str(field) else ""
            return f"the weight is no positive, finite number: {field!r}{comma}"

        self.refuse(pa.array(~good), reason, column)

    def make_times(self) -> None:
        """Make numbers or dates of the times; refuse rows that have none.

        The first row says which; a date without a zone is in UTC.
        """
        column = self.columns[TIME]
        if pa.types.is_temporal(column.type):
            times = column.cast(pa.timestamp("us", getattr(column.type, "tz", None)), safe=False)
        else:
            is_any = (kind for kind in _TIMES if _cast(column[:1], kind) is not None)
            times = _parsed(column, next(is_any, _TIMES[0]))
        is_date = pa.types.is_temporal(times.type)
        self.columns[TIME] = times = times.cast(pa.timestamp("us")) if is_date else times
        self.refuse(
            pc.invert(times.is_valid() if is_date else pc.fill_null(pc.is_finite(times), False)),
            lambda time: (
                f"the time is {time!r}; a time is a number or an ISO date (2024-05-31 or "
                "2024-05-31T18:00:00Z), and the same kind in every row"
            ),
            column,
        )


def _parsed(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column (B,) as another type, with null where a field does not fit."""
    if (cast := _cast(column, kind)) is not None:
        return cast
    fields = (_cast(column[row : row + 1], kind) for row in range(len(column)))
    return pa.array([None if field is None else field[0].as_py() for field in fields], kind)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Return a column as another type, or None if a field does not fit or is no UTF-8."""
    try:
        cast = column.cast(kind, safe=not pa.types.is_integer(column.type))
        cast.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return cast
