"""Turn the fields of a table into labels, weights and times; an error names the row of a bad one.

Shapes: B rows of a batch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import TIME, WEIGHT
from kge_torchrec.data.labels import LONGEST, fault_of, first_fault
from kge_torchrec.data.readers.columns import Columns, Found
from kge_torchrec.errors import DataError

TEXT = pa.large_string()
_TEXTS = pa.types.is_string, pa.types.is_string_view, pa.types.is_binary, pa.types.is_large_binary

# Columns (B,) by position, and what names a row, such as "visits.csv:17".
Block: TypeAlias = tuple[dict[int, pa.Array], Callable[[int], str]]


class Table(NamedTuple):
    """An opened table.

    Args:
        source: Its name in messages.
        columns: The columns that are read.
        found: Where they are.
        blocks: Its rows.
        notes: Where and how it was read, where that was a guess.
        header: The name of each column that is read, if rows may be the header again.
        skipped: Counts bad rows, which are then left out; None raises an error for them.
        literals: Numbers of triples of RDF that are left out, once the rows are read.
    """

    source: str
    columns: Columns
    found: Found
    blocks: Iterator[Block]
    notes: Sequence[tuple[str, str]] = ()
    header: Mapping[int, str] = {}
    skipped: Skipped | None = None
    literals: Sequence[int] = ()


def place_among(place: Callable[[int], str], rows: np.ndarray) -> Callable[[int], str]:
    """Return what names a row among some rows of a block."""
    return lambda row: place(int(rows[row]))


def no_rows(source: object, columns: Columns) -> DataError:
    """Return the error for a file without rows."""
    what = "triples" if columns.of_triples else "rows"
    return DataError(f"{source}: empty file: no {what}; fill it, name another or leave it out")


class Skipped:
    """The bad rows of a file that are left out: their number, and the first three of a kind."""

    def __init__(self) -> None:
        self.count = 0
        self._said: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, count: int, reason: Callable[[int], str]) -> None:
        """Count rows of a kind; ``reason`` returns what is wrong with one, by its number."""
        self.count += count
        said = self._said[kind]
        said += [reason(row) for row in range(min(count, 3 - len(said)))]

    def __str__(self) -> str:
        said = chain(*self._said.values())
        ordered = sorted(said, key=lambda text: int(re.findall("[: ]([0-9]+): ", text)[0]))
        return f"{self.count:,} bad lines were left out: {'; '.join(ordered[:3])}"


def batches_of(table: Table, labels: LabelFiles | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the required columns as large_string, and weight and time where there are some.

    Gives the ids of "entities" or "relations" the labels of a file.

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


class LabelFile:
    """The labels (N,) of ids (N,), by a file such as entity2id.txt or entities.dict.

    Unless a key names the file, the first ids say whether it is used, and ``notes`` take that.
    """

    def __init__(
        self,
        path: str,
        ids: pa.Array,
        labels: pa.Array,
        is_named: bool,
        notes: list[tuple[str, str]],
    ):
        self.path, self._ids, self._labels, self._notes = path, ids, labels, notes
        self._used: bool | None = is_named or None
        for column, what in ((ids, "id"), (labels, "label")):
            counts = pc.value_counts(column)
            twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
            if len(twice):
                raise DataError(f"{path}: the {what} {twice[0].as_py()!r} is there twice")

    def labels_of(self, ids: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the labels of ids (B,), and which of them are unknown."""
        known = pc.index_in(ids, value_set=self._ids)
        if self._used is None:
            self._decide(ids, known)
        if not self._used:
            return ids, pa.array([], pa.bool_())
        return self._labels.take(known), known.is_null()

    def _decide(self, ids: pa.Array, known: pa.Array) -> None:
        """Decide by the first ids whether they are ids of this file, labels of it, or neither."""
        are_labels = pc.all(pc.is_in(ids, value_set=self._labels)).as_py()
        if are_labels and not known.null_count:
            raise DataError(
                f"{self.path}: the triples may hold its ids or its labels; data.labels names the "
                "file if they are ids, and has none instead if they are labels"
            )
        self._used = not are_labels and known.null_count * 2 <= len(ids)
        said = "its labels take the place of ids; data.labels sets other files or none"
        if not self._used:
            what = "its labels" if are_labels else "few of its ids"
            said = f"not used: the triples have {what}; data.labels names files that are"
        self._notes.append((self.path, said))


LabelFiles: TypeAlias = Mapping[str, LabelFile]  # of "entities" and "relations"


class _Rows:
    """The rows of a block that are left, first by position and then by role."""

    def __init__(self, block: Block, table: Table):
        self.columns: dict[Any, pa.Array] = dict(block[0])
        self._place, self._skipped = block[1], table.skipped
        self._is_edge = table.columns.of_triples
        self._numbers: np.ndarray | None = None  # of the rows that are left
        again = [pc.equal(self.columns[at], name) for at, name in table.header.items()]
        if again:
            self.refuse(
                reduce(pc.and_, again), lambda _: "the header again, as in two files in one"
            )

    def keep(self, mask: pa.Array) -> None:
        """Leave out the rows that a mask (B,) of booleans does not have."""
        if pc.all(mask).as_py() is False:
            rows = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
            self._numbers = rows if self._numbers is None else self._numbers[rows]
            self.columns = {key: column.filter(mask) for key, column in self.columns.items()}

    def refuse(self, bad: pa.Array, reason: Callable[[int], str]) -> None:
        """Leave out and count the rows that a mask (B,) has, or raise DataError for the first."""
        rows = np.flatnonzero(bad.to_numpy(zero_copy_only=False))
        if not len(rows):
            return

        def said(position: int) -> str:
            row = int(rows[position])
            number = row if self._numbers is None else int(self._numbers[row])
            return f"{self._place(number)}: {reason(row)}"

        if self._skipped is None:
            raise DataError(said(0))
        self._skipped.add("fields", len(rows), said)
        self.keep(pc.invert(bad))

    def make_labels(self, role: str) -> None:
        """Make large_string of a column; refuse rows whose text can be no label."""
        column = self.columns[role]
        if not pa.types.is_large_string(column.type):
            column = self.columns[role] = self._as_text(role, column)
        if first_fault(column) is None:
            return
        text = pc.fill_null(column, "")
        size = pc.binary_length(text)
        bad = pc.or_(pc.equal(size, 0), pc.greater(size, LONGEST))
        bad = pc.or_(bad, pc.or_(pc.utf8_is_space(text), pc.match_substring(text, "\0")))
        self.refuse(bad, lambda row: f"the {role} {fault_of(text[row].as_py())}")

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

    def name(self, role: str, file: LabelFile) -> None:
        """Put the labels of a file in the place of ids."""
        ids = self.columns[role]
        self.columns[role], unknown = file.labels_of(ids)
        self.refuse(unknown, lambda row: f"the {role} {ids[row].as_py()!r} is no id of {file.path}")

    def add_type(self, role: str, kind: str | None) -> None:
        """Make labels such as "user:17" of ids, by a type or by a column of types."""
        if (name := f"{role}_type") in self.columns:
            colons = pc.match_substring(self.columns[name], ":")
            self.refuse(colons, lambda row: f"the {name} has a colon, which ends the type")
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
            lambda row: (
                f"the relation {relations[row].as_py()!r} has no weight; those with one are "
                f"{', '.join(kinds)}; give it one, or leave such rows out with data.where"
            ),
        )

    def make_weights(self) -> None:
        """Make float32 of the weights; refuse rows whose weight is not positive and finite."""
        column = self.columns[WEIGHT]
        numbers, _ = _parsed(column, [pa.float64()])
        values = numbers.to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            weights = values.astype(np.float32)
            good = np.isfinite(weights) & (weights > 0)
        self.columns[WEIGHT] = pa.array(weights)

        def reason(row: int) -> str:
            field = column[row].as_py()
            if self._is_edge and values[row] < 0:
                return (
                    f"the weight {field} is negative, a signed edge; give positive and negative "
                    "edges a relation each, or leave the column out by naming others with "
                    "data.columns"
                )
            comma = "; write a decimal point" if "," in str(field) else ""
            return f"the weight is no positive, finite number: {field!r}{comma}"

        self.refuse(pa.array(~good), reason)

    def make_times(self) -> None:
        """Make int64, float64 or timestamps of the times; refuse rows that have none."""
        column = self.columns[TIME]
        zone = getattr(column.type, "tz", None)
        if zone is not None:
            column, zone = column.cast(pa.timestamp(column.type.unit, "UTC")), "UTC"
        kinds = [pa.int64(), pa.float64()]
        kinds += [pa.timestamp(unit, at) for at in (None, "UTC") for unit in ("us", "ns")]
        if pa.types.is_temporal(column.type):
            kinds = [kind for kind in kinds if getattr(kind, "tz", "") == zone]
        times, kind = _parsed(column, kinds)
        good = pc.is_finite(times) if pa.types.is_floating(kind) else times.is_valid()
        self.columns[TIME] = times
        self.refuse(
            pc.invert(pc.fill_null(good, False)),
            lambda row: (
                f"the time is {column[row].as_py()!r}; a time is a number or an ISO date "
                "(2024-05-31 or 2024-05-31T18:00:00Z), and the same kind in every row"
            ),
        )


def _parsed(column: pa.Array, kinds: list[pa.DataType]) -> tuple[pa.Array, pa.DataType]:
    """Return a column (B,) in the first kind that holds it all, and that kind.

    If none does, the kind is that of the first row, and fields that do not fit are null.
    """
    for kind in kinds:
        cast = _cast(column, kind)
        is_float = pa.types.is_floating(kind) and len(kinds) > 1
        if cast is not None and (not is_float or pc.all(pc.is_finite(cast)).as_py()):
            return cast, kind
    kind = next((kind for kind in kinds if _cast(column[:1], kind) is not None), kinds[-1])
    fields = (_cast(column[row : row + 1], kind) for row in range(len(column)))
    return pa.array([None if field is None else field[0].as_py() for field in fields], kind), kind


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Return a column as another type, or None if a field does not fit or is no UTF-8."""
    try:
        cast = column.cast(kind)
        cast.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return cast
