"""Types of entities, such as user and item, and at the ends of relations.

An entity may have several types, or none.  A store is typed if each entity has one: then the ids of
a type are runs, one in each of ``PARTS`` equal parts of all ids, and relations know the types of
their ends.  So the ranks, which split the ids into equal blocks, look up equally many rows.

Shapes: N entities, K types, B queries.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np

from kge_torchrec.data import ENTITY, FEATURES, OTHER, RELATION, SIDES, Side, answer_column
from kge_torchrec.data.store import TripleStore, Vocabulary
from kge_torchrec.data.store.attributes import Attributes
from kge_torchrec.errors import DataError

PARTS = 8  # as many ranks, or a divisor of it, have equal shares of every type


def types_of(store: TripleStore) -> Attributes:
    """Return the types of the entities of a store; DataError if it has none."""
    types = store.types()
    if types is None:
        raise DataError(f"{store.path} has no types of entities: prepare it again with data.types")
    return types


def runs_of_types(store: TripleStore) -> list[tuple[str, range]]:
    """Return the runs of consecutive ids of one type, in order of ids, with the type's label.

    An extended store may have several runs of a type.  Entities without types are one run, and
    features another one behind all entities.
    """
    runs = [(ENTITY, range(store.num_entities))]
    if store.size.typed:
        types = types_of(store)
        names, bounds = types.names.to_pylist(), _bounds_of_runs(types.ids).tolist()
        runs = [(names[types.ids[a]], range(a, b)) for a, b in pairwise(bounds)]
    if store.has_features:
        runs.append((FEATURES, range(store.num_entities, store.num_rows)))
    return runs


class Ends:
    """Which types stand at the ends of each relation of a typed store."""

    label = "entities of the types that the relation has on that side"

    def __init__(self, store: TripleStore):
        types = types_of(store)
        self.names: list[str] = types.names.to_pylist()
        self._entities, self._relations = store.entities, store.relations
        self.type = types.ids  # (N,) of each entity, an index in names
        self._new = np.empty((0, len(self.names)), bool)  # possible types of ids from N on
        self._bounds = _bounds_of_runs(types.ids)
        ends = store.report["types"]["ends"]  # pairs of types by relation
        relations = store.relations.array.to_pylist()
        shape = len(relations), len(self.names)
        self._allowed = {side: np.zeros(shape, bool) for side in SIDES}
        for relation, label in enumerate(relations):
            # A relation that train does not have may have any ends.
            for pair in ends.get(label) or ([name, name] for name in self.names):
                for side, name in zip(SIDES, pair, strict=True):
                    self._allowed[side][relation, self.names.index(name)] = True
        self._sets = {
            side: np.unique(allowed, axis=0, return_inverse=True)
            for side, allowed in self._allowed.items()
        }

    def with_entities(self, types: np.ndarray, entities: Vocabulary) -> Ends:
        """Return the ends of a graph with U more entities, of possible ``types`` (U, K) bool.

        ``entities`` are the labels of all.
        """
        more = copy.copy(self)
        more._new, more._entities = types, entities
        return more

    def kinds(self, side: Side, relations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct sets of types (U, K) bool of relations (B,), and each one's (B,)."""
        sets, of_relation = self._sets[side]
        some, place = np.unique(of_relation.ravel()[relations], return_inverse=True)
        return sets[some], place

    def ranges(self, types: np.ndarray) -> np.ndarray:
        """Return the entities of types (K,) bool as ranges of ids: (S, 2), start and stop."""
        chosen = np.concatenate([[False], types[self.type[self._bounds[:-1]]], [False]])
        return self._bounds[np.diff(chosen)].reshape(-1, 2)

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Return which of the entities [first, stop) may be on a side: (n,) bool."""
        return self._allowed[side][relation, self.type[first:stop]]

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Return whether each entity (B,) may be on a side of its relation (B,): (B,) bool."""
        allowed, is_new = self._allowed[side], entities >= len(self.type)
        fits = allowed[relations, self.type[np.where(is_new, 0, entities)]]
        possible = self._new[entities[is_new] - len(self.type)]
        fits[is_new] = (allowed[relations[is_new]] & possible).any(1)
        return fits

    def check(self, missing: str, queries: np.ndarray) -> None:
        """Raise DataError unless the entities of queries (B, 3) on the side given may be there."""
        side = OTHER[missing]
        entities, relations = queries[:, answer_column(side)], queries[:, RELATION]
        wrong = ~self.contain(side, relations, entities)
        if wrong.any():
            entity, relation = (int(ids[wrong.argmax()]) for ids in (entities, relations))
            right = np.flatnonzero(self._allowed[side][relation])
            own = self.type[entity : entity + 1]
            if entity >= len(self.type):
                own = np.flatnonzero(self._new[entity - len(self.type)])
            said, should = (" or ".join(self.names[k] for k in kinds) for kinds in (own, right))
            raise DataError(
                f"the {side} {self._entities[entity]!r} is a {said}; "
                f"{self._relations[relation]!r} has a {should} as its {side}"
            )


def _bounds_of_runs(types: np.ndarray) -> np.ndarray:
    """Return where each run of ids with one type starts, and N."""
    return np.flatnonzero(np.diff(types, prepend=-1, append=-1))
