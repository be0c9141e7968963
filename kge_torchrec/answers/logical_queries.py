"""Logical queries of several steps, in a small JSON form.

    "Austria"                              an entity
    {"relation": "borders", "from": Q}     tails of (Q, borders, ?)
    {"relation": "locatedin", "to": Q}     heads of (?, locatedin, Q)
    {"and": [Q, Q, {"not": Q}]}            members of every query, except those of "not"
    {"or": [Q, Q]}                         members of any query

Q is any of these forms. ``fuzzy_answers`` answers the queries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kge_torchrec.errors import DataError, KGEError
from kge_torchrec.files import in_words
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.trained_model import TrainedModel

DEEPEST = 50  # levels of nested steps


class QueryError(KGEError, ValueError):
    """An invalid logical query; the message says where."""

    on_every_rank = True


@dataclass(frozen=True)
class Entity:
    """One entity."""

    id: int


@dataclass(frozen=True)
class Step:
    """The entities that a relation links to members of another query."""

    relation: int
    side: Side  # the side of the answers
    of: Node


@dataclass(frozen=True)
class And:
    """The common members of some queries, without the members of others."""

    parts: tuple[Node, ...]  # at least one
    without: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Or:
    """The members of any of some queries."""

    parts: tuple[Node, ...]


Node = Entity | Step | And | Or


def read_query(path: str | Path, model: TrainedModel) -> Node:
    """Read a query from a JSON file.

    Raises:
        DataError: The file cannot be read or is not JSON.
        QueryError: The query is invalid.
        UnknownLabelError: A label is not in the data; the message has close matches.
    """
    try:
        value = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise DataError(in_words(error)) from error
    except ValueError as error:
        raise DataError(f"{path}: invalid JSON: {error}") from error
    except RecursionError:
        raise QueryError(f"{path}: more than {DEEPEST} nested steps") from None
    return parse_query(value, model)


def parse_query(value: Any, model: TrainedModel) -> Node:
    """Build a query from a JSON value.

    Raises:
        QueryError: The query is invalid.
        UnknownLabelError: A label is not in the data; the message has close matches.
    """
    return _Parser(model).node(value, "query", 0)


class _Parser:
    """Builds nodes from JSON values; ``place`` is the position in the query, for error messages."""

    def __init__(self, model: TrainedModel):
        self._model = model

    def node(self, value: Any, place: str, depth: int) -> Node:
        if depth > DEEPEST:
            raise QueryError(f"{place[:60]}...: more than {DEEPEST} nested steps")
        if isinstance(value, str):
            return Entity(int(self._model.entity_ids(value)))
        if isinstance(value, dict):
            keys = set(value)
            if keys in ({"relation", "from"}, {"relation", "to"}):
                return self._step(value, place, depth)
            if keys == {"and"}:
                return self._and(value["and"], f"{place}.and", depth)
            if keys == {"or"}:
                return Or(self._nodes(value["or"], f"{place}.or", depth))
            if keys == {"not"}:
                raise QueryError(
                    f'{place}: "not" must be inside an "and", together with other queries'
                )
        raise QueryError(
            f"{place}: expected the label of an entity or an object with the keys relation and "
            f"from, relation and to, and, or; got {_shown(value)}"
        )

    def _step(self, value: dict[str, Any], place: str, depth: int) -> Step:
        relation = value["relation"]
        if not isinstance(relation, str):
            raise QueryError(f"{place}.relation: expected a label, got {_shown(relation)}")
        side: Side = "tail" if "from" in value else "head"
        key = "from" if side == "tail" else "to"
        number = int(self._model.relation_ids(relation))
        return Step(number, side, self.node(value[key], f"{place}.{key}", depth + 1))

    def _and(self, parts: Any, place: str, depth: int) -> And:
        parts = self._list(parts, place)
        is_not = [isinstance(part, dict) and set(part) == {"not"} for part in parts]
        if all(is_not):
            raise QueryError(f'{place}: "and" needs at least one query without "not"')
        made: dict[bool, list[Node]] = {True: [], False: []}
        for number, (part, negated) in enumerate(zip(parts, is_not, strict=True)):
            inner, where = part["not"] if negated else part, f"{place}[{number}]"
            made[negated].append(self.node(inner, f"{where}.not" if negated else where, depth + 1))
        return And(tuple(made[False]), tuple(made[True]))

    def _nodes(self, parts: Any, place: str, depth: int) -> tuple[Node, ...]:
        return tuple(
            self.node(part, f"{place}[{number}]", depth + 1)
            for number, part in enumerate(self._list(parts, place))
        )

    def _list(self, parts: Any, place: str) -> list[Any]:
        if not isinstance(parts, list) or not parts:
            raise QueryError(f"{place}: expected a list of queries, got {_shown(parts)}")
        return parts


def _shown(value: Any) -> str:
    """Return a value as error messages show it: as JSON if possible, otherwise as Python."""
    try:
        return json.dumps(value)[:80]
    except (TypeError, ValueError):
        return repr(value)[:80]
    except RecursionError:
        return "JSON that is nested too deeply"
