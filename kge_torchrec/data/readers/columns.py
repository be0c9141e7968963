"""Find the columns of a table: by name or position, by known words, or in their order.

A role is what a column means: head, relation and tail of triples, perhaps weight, time, head_type
and tail_type; or entity and feature of a list of features.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kge_torchrec.data import COLUMNS, TIME, WEIGHT
from kge_torchrec.data.readers.where import Where
from kge_torchrec.errors import DataError

TYPES = ("head_type", "tail_type")
ROLES = (*COLUMNS, WEIGHT, TIME, *TYPES)
EDGE = ("head", "tail")

_WORDS = {
    "head": "head h subject subj s source src from head_id subject_id source_id "
    "head_entity entity1 entity_1 e1 node1 _start",
    "relation": "relation rel r predicate pred p property edge edge_type relation_type type label "
    "relation_id predicate_id relationship relationship_type event event_type _type",
    "tail": "tail t object obj o target dst dest destination to tail_id object_id target_id "
    "tail_entity entity2 entity_2 e2 node2 _end",
    WEIGHT: "weight weights confidence conf certainty probability rating",
    TIME: "time timestamp date datetime",
    "head_type": "head_type",
    "tail_type": "tail_type",
}
NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?([eE][-+]?\d+)?|\d{4}-\d\d-\d\d[T ]?[\d:.Z+-]*")
_ROLE_OF = {word: role for role, words in _WORDS.items() for word in words.split()}
# The words of lists of entities; "type" and "label" are relations in files of triples.
_LISTED = {
    "entity": {"entity", "node", "item", "iri", "uri", "subject", "head"},
    "label": {"label", "name", "entity", "relation"},
}

# Neo4j's bulk format: ``:START_ID(Person)`` has the id space Person, ``weight:float`` a type.
_NEO4J = re.compile(r"[^:]*:(START_ID|END_ID|TYPE)(?:\((.*)\))?")
_NEO4J_ROLES = {"START_ID": "head", "END_ID": "tail", "TYPE": "relation"}
_NEO4J_TYPE = re.compile(r":(int|long|float|double|boolean|byte|short|string|date\w*)(\[\])?$")


def plain(name: str) -> str:
    """Return a column name in lower case, without characters around it that do not matter."""
    return _NEO4J_TYPE.sub("", name.strip()).lstrip("#:?@").strip().lower()


def stem(name: str) -> str:
    """Return a column name without "_id", such as "user" of "user_id"."""
    return re.sub("_?id$", "", plain(name))


def role_of(name: str) -> str | None:
    """Return the role that a column name means in a file of triples, or None."""
    neo4j = _NEO4J.fullmatch(name.strip())
    return _NEO4J_ROLES[neo4j[1]] if neo4j else _ROLE_OF.get(plain(name))


def is_header(fields: Sequence[str]) -> bool:
    """Return whether three fields mean a head, a relation and a tail, in any order."""
    return len(fields) == 3 and {role_of(name) for name in fields} == set(COLUMNS)


class Found(NamedTuple):
    """The columns of a table."""

    places: dict[str, int]  # the position of each role
    others: Mapping[str, int] = {}  # the position of each further column that is read, by name
    names: Sequence[str] | None = None  # of all columns, if the table has some
    constants: Mapping[str, str] = {}  # as in `Columns`, with types that the names of columns say
    by_order: bool = False  # whether the order of the columns decided which end is which

    def __str__(self) -> str:
        """Return which column of a header has which role, and which columns are left out."""
        names, read = self.names or (), {*self.places.values(), *self.others.values()}
        named = ", ".join(f"{role} {clipped(names[at])!r}" for role, at in self.places.items())
        left = [repr(clipped(name)) for at, name in enumerate(names) if at not in read]
        return f"{named}; left out: {', '.join(left)}" if left else named


@dataclass(frozen=True)
class Columns:
    """Where each role is in a table, as far as that is known before the table is seen.

    ``entities`` is for lists: the type of the entities in a column, or None, by the column's
    `plain` name or its `stem`.
    """

    required: tuple[str, ...] = COLUMNS  # in the order of a table without known names
    optional: tuple[str, ...] = (WEIGHT, *TYPES)  # read where a column is named so
    last: tuple[str, ...] = ()  # further columns of a table without names, which may lack them
    places: Mapping[str, str | int] = field(default_factory=dict)  # names, or positions from 0
    constants: Mapping[str, str] = field(default_factory=dict)  # a relation, or types of the ends
    kinds: Mapping[str, float] | None = None  # the weight of each relation, if triples weigh so
    where: Where | None = None
    entities: Mapping[str, str | None] = field(default_factory=dict)
    key: str = "data.columns"  # sets ``places``, for messages; empty if there is none

    @property
    def of_triples(self) -> bool:
        """Whether the keys of reading act, which they do on files of triples only."""
        return "head" in self.required

    @property
    def positional(self) -> tuple[str, ...]:
        """The required roles that no constant has."""
        return tuple(role for role in self.required if role not in self.constants)

    @property
    def width(self) -> int:
        """The smallest number of columns that a table can have."""
        positions = [place + 1 for place in self.places.values() if isinstance(place, int)]
        return max(len(self.positional), *positions, 1)

    @property
    def is_given(self) -> bool:
        """Whether every required role has a place."""
        return bool(self.places) and set(self.positional) <= set(self.places)

    def are_named(self, fields: Sequence[str]) -> bool:
        """Return whether the fields of a first row are names of columns."""
        if any(isinstance(place, str) for place in self.places.values()):
            return True
        kinds = {self.constants.get(kind, "").lower() for kind in TYPES} - {""}
        if all(stem(name) in kinds for name in fields):  # user_id, user_id
            return True
        roles = (*self.positional, *ROLES)
        means = [next((r for r in roles if self.means(name, r)), None) for name in fields]
        are_known = None not in means and len(set(means)) == len(means) > 1
        return are_known or {*self.positional} - {"feature"} <= {*means}

    def find(self, source: str, fields: Sequence[str], named: bool) -> Found:
        """Return the columns of a table by its names, or by the fields of its first row.

        Known names decide; the order decides only between columns whose names are not known.

        Raises:
            DataError: A required role has no column, or several.
        """
        shown = f"{source}: {listed(fields)}"
        found = {role: self._given(shown, role, fields, named) for role in self.places}
        for position in found.values():
            if len(same := [role for role, at in found.items() if at == position]) > 1:
                raise DataError(f"{shown}: {self.key} takes one of them for {' and '.join(same)}")
        free = [at for at in range(len(fields)) if at not in found.values()]
        for role in (*self.positional, *self.optional) if named else ():
            if role in found or role in self.constants or (self.is_given and role == WEIGHT):
                continue
            means = [at for at in free if self.means(fields[at], role)]
            exact = [at for at in means if fields[at] == role]
            means = exact if len(exact) == 1 else means
            if len(means) > 1:
                both = " and ".join(repr(fields[at]) for at in means)
                raise DataError(f"{shown}: {both} both stand for the {role}; {self._remedy(found)}")
            if means:
                found[role] = means[0]
                free.remove(means[0])
        missing, others = [role for role in self.positional if role not in found], {}
        if named and missing == ["feature"] and len(fields) > len(found):
            found.pop(WEIGHT, None)
            others = {name: at for at, name in enumerate(fields) if at not in found.values()}
            missing = []
        if not named and not self.places:
            extra = len(fields) - len(missing)
            missing += self.last[-extra:] if 0 < extra <= len(self.last) else ()
        if len(free) > len(missing):  # columns whose names mean something else
            free = [at for at in free if not (named and role_of(fields[at]) in (WEIGHT, TIME))]
        if missing and len(free) != len(missing):
            what = f"no column stands for the {' or the '.join(missing)}" if named else (
                f"expected {len(self.positional)} columns ({', '.join(self.positional)})"
            )  # fmt: skip
            raise DataError(f"{shown}; {what}. {self._remedy(found, fields)}")
        found |= dict(zip(missing, free, strict=True)) if missing else {}
        places = {
            role: found[role] for role in (*self.required, *ROLES, *self.optional) if role in found
        }
        for name in self.where.names if self.where else ():
            at = fields.index(name) if named and name in fields else places.get(name)
            if at is None:
                raise DataError(f"{source}: data.where names {name!r}, which is no column")
            others[name] = at
        constants = dict(self.constants)
        for role, at in places.items() if named else ():
            name = fields[at]
            space = _NEO4J.fullmatch(name.strip())
            kind = space and space[2]
            if role == "entity":
                kind = self.entities.get(plain(name), self.entities.get(stem(name)))
            if kind:
                constants.setdefault(f"{role}_type", kind)
        return Found(places, others, fields if named else None, constants, len(missing) > 1)

    def means(self, name: str, role: str) -> bool:
        """Return whether a column name means a role."""
        kinds = [self.constants.get(kind, "").lower() for kind in TYPES]
        is_end = role in EDGE and kinds[0] != kinds[1]  # user_id is an end of type user
        if is_end and stem(name) == kinds[EDGE.index(role)]:
            return True
        if self.of_triples:
            return role_of(name) == role
        if role == "entity" and {plain(name), stem(name)} & {*self.entities}:
            return True
        words = _LISTED.get(role, set()) | {role, f"{role}_id"}
        return plain(name) in words or role == WEIGHT == role_of(name)

    def _given(self, shown: str, role: str, fields: Sequence[str], named: bool) -> int:
        """Return the position of a role that was given by name or position."""
        place = self.places[role]
        if isinstance(place, int):
            if place >= len(fields):
                raise DataError(
                    f"{shown}: {self.key} {role}={place}: there is no such column; positions "
                    f"count from 0, so the last one is {len(fields) - 1}"
                )
            return place
        if not named:
            raise DataError(
                f"{shown}: {self.key} {role}={place}: a table without a header has no names; give "
                "positions, which count from 0, or set data.has_header true"
            )
        same = [at for at, name in enumerate(fields) if name.strip() == place]
        same = same or [at for at, name in enumerate(fields) if plain(name) == plain(place)]
        if len(same) != 1:
            what = "no column" if not same else f"{len(same)} columns"
            close = difflib.get_close_matches(place, list(fields), 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            hint = hint or "; without a header, give positions from 0"
            raise DataError(f"{shown}: {self.key} {role}={place}: {what} of this name{hint}")
        return same[0]

    def _remedy(self, found: Mapping[str, int], fields: Sequence[str] = ()) -> str:
        if not self.key:
            return f"Give it columns with the names {' and '.join(self.positional)}"
        places = [
            f"{role}={fields[found[role]] if role in found and fields else 'COLUMN'}"
            for role in self.positional
        ]
        remedy = (
            f"Say which is which with {self.key} {','.join(places)} (names, or positions from 0)"
        )
        if "relation" in self.positional and "relation" not in found:
            remedy += "; data.relation NAME gives all triples one relation"
        if self.of_triples:
            remedy += "; a description of edge files (YAML) gives ends their types"
        if self.of_triples and fields and len(fields) == len(self.positional) + 1:
            last, at = fields[-1], len(fields) - 1
            is_time = "-" in last[1:] or re.fullmatch(r"1\d{9}(\d{3}){0,3}(\.\d+)?", last)
            role = TIME if is_time else WEIGHT
            if NUMBER.fullmatch(last):
                remedy += f". If column {at} is the {role}, data.columns {role}={at} reads it"
        return remedy


def listed(fields: Sequence[str]) -> str:
    """Return the columns of a table with their positions, as messages show them."""
    shown = [f"{at} {clipped(name)!r}" for at, name in enumerate(fields[:12])]
    more = f" and {len(fields) - 12} more" if len(fields) > 12 else ""
    return f"{len(fields)} columns: {', '.join(shown)}{more}"


def clipped(text: str, size: int = 40) -> str:
    """Return a text of at most ``size`` characters for a message."""
    return text if len(text) <= size else f"{text[: size - 3]}..."


def given_columns(columns: Any, constants: Mapping[str, str], key: str = "data.columns") -> Columns:
    """Return the columns of ``{role: column}`` or ``role=column,...``, beside some constants.

    Weight may be {RELATION: WEIGHT}.

    Raises:
        DataError: A role is unknown, its column is no name and no position, or a weight is wrong.
    """
    given = columns
    if isinstance(columns, str):
        parts = (part.partition("=")[::2] for part in columns.split(","))
        named = {role.strip(): place.strip() for role, place in parts}
        columns = {r: int(at) if re.fullmatch("-?[0-9]+", at) else at for r, at in named.items()}
    if not isinstance(columns, Mapping) or "" in columns.values():
        raise DataError(
            f"{key}: give head=COLUMN,relation=COLUMN,tail=COLUMN, by names or positions from 0, "
            f"got {given!r}"
        )
    places = dict(columns)
    kinds = places.pop(WEIGHT) if isinstance(places.get(WEIGHT), Mapping) else None
    for role, place in places.items():
        if role not in ROLES:
            raise DataError(f"{key}: {role!r} is no role; roles are {', '.join(ROLES)}")
        if isinstance(place, bool) or not isinstance(place, int | str):
            raise DataError(f"{key}.{role} must be a column's name or position, got {place!r}")
        if isinstance(place, int) and place < 0:
            raise DataError(f"{key} {role}={place}: positions count from 0")
    for kind, weight in (kinds or {}).items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < float("inf"):
            raise DataError(f"{key}: the weight of {kind!r} must be a number > 0, got {weight!r}")
    if "relation" in constants and (kinds is not None or "relation" in places):
        raise DataError(
            f"{key}: all triples have the relation {constants['relation']!r}; leave it out, or the "
            "column of relations and weights of relations"
        )
    if kinds is not None:
        kinds = {str(kind): float(weight) for kind, weight in kinds.items()}
    return Columns(places=places, constants=constants, kinds=kinds, key=key)
