"""Types of entities, such as user and item: of a store or a file, and at the ends of relations.

An entity may have several types, or none.  A store is typed if each entity has one: then the ids of
a type are runs, one in each of ``PARTS`` equal parts of all ids, and relations know the types of
their ends.  So the ranks, which split the ids into equal blocks, look up equally many rows.
`type_sources` finds the types of a store.

Shapes: N entities, K types, M pairs of an entity and a type, B queries.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import (
    ENTITY,
    FEATURES,
    OTHER,
    RELATION,
    SIDES,
    Side,
    answer_column,
)
from kge_torchrec.data.readers.fields import LabelFiles
from kge_torchrec.data.readers.lists import read_types
from kge_torchrec.data.sort import pointers, sorted_rows
from kge_torchrec.data.store import TripleStore, Vocabulary
from kge_torchrec.data.store.filter_index import Ranges
from kge_torchrec.errors import DataError

PARTS = 8  # as many ranks, or a divisor of it, have equal shares of every type


@dataclass(frozen=True)
class EntityTypes:
    """The types of all entities of a store.

    Args:
        names: (K,) labels of the types, a pyarrow array.
        indptr: (N + 1,) int64, where the types of each entity start in ``types``.
        types: (M,) int64, ascending for each entity, each once.
    """

    names: pa.Array
    indptr: np.ndarray
    types: np.ndarray

    @classmethod
    def of_pairs(
        cls,
        entities: np.ndarray,
        kinds: pa.Array,
        num_entities: int,
        before: EntityTypes | None = None,
    ) -> EntityTypes:
        """Return the types from pairs of an entity (M,) and the label of a type (M,).

        Pairs have any order and may repeat.  Those of ``before`` are added; its types keep their
        numbers.
        """
        names = pc.unique(kinds)
        names = names.take(pc.array_sort_indices(names))
        if before is not None:
            is_new = pc.invert(pc.is_in(names, value_set=before.names))
            names = pa.concat_arrays([before.names, names.filter(is_new)])
        types = pc.index_in(kinds, value_set=names).to_numpy().astype(np.int64)
        if before is not None:
            old, older = before.pairs().T
            entities, types = np.concatenate([old, entities]), np.concatenate([older, types])
        if not (np.diff(entities) > 0).all():
            entities, types = sorted_rows((entities, types), (num_entities, len(names)))
            new = np.ones(len(types), bool)
            new[1:] = (np.diff(entities) != 0) | (np.diff(types) != 0)
            entities, types = entities[new], types[new]
        return cls(names, pointers(entities, num_entities), types)

    @classmethod
    def of_rows(
        cls, rows: pa.Table, entities: pa.Array, before: EntityTypes | None = None
    ) -> EntityTypes:
        """Return the types from labels in columns entity and type; others than (N,) are left out.

        ``before`` is as for ``of_pairs``.
        """
        place = pc.index_in(rows["entity"], value_set=entities).combine_chunks()
        kinds = rows["type"].filter(place.is_valid()).cast(pa.large_string()).combine_chunks()
        places = place.drop_null().to_numpy().astype(np.int64)
        return cls.of_pairs(places, kinds, len(entities), before)

    @classmethod
    def read(
        cls,
        path: str | Path,
        entities: pa.Array,
        labels: LabelFiles | None = None,
        before: EntityTypes | None = None,
    ) -> EntityTypes:
        """Read a file of lines "entity, tab, type", without entities that are not in the graph.

        Args:
            path: The file.
            entities: Labels (N,).
            labels: Files of labels, if the file has the ids of triples.
            before: As for ``of_pairs``.

        Raises:
            DataError: The file is missing, has other columns or none of the graph's entities.
        """
        rows = read_types(Path(path), labels)
        types = cls.of_rows(rows, entities, before)
        if not len(types.types):
            raise DataError(
                f"{path}: none of its {len(rows):,} entities is in the graph; a line should be an "
                "entity's label, a tab and a type"
            )
        return types

    @classmethod
    def of(cls, store: TripleStore) -> EntityTypes:
        """Return the types of a store.

        Raises:
            DataError: The store has no types.
        """
        table = store.types()
        if table is None:
            raise DataError(
                f"{store.path} has no types of entities: prepare it again with data.types"
            )
        return cls(*table)

    def __len__(self) -> int:
        return len(self.names)

    def pairs(self) -> np.ndarray:
        """Return the pairs of entity and type, (M, 2) int64."""
        entities = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        return np.stack([entities, self.types], 1)

    def of_entities(self, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the types of entities (B,): which of the B (M,), ascending, and its type (M,)."""
        return Ranges(self.types, self.indptr[entities], self.indptr[entities + 1]).gathered()


def runs_of_types(store: TripleStore) -> list[tuple[str, range]]:
    """Return the runs of consecutive ids of one type, in order of ids, with the type's label.

    An extended store may have several runs of a type.  Entities without types are one run, and
    features another one behind all entities.
    """
    runs = [(ENTITY, range(store.num_entities))]
    if store.size.typed:
        table = EntityTypes.of(store)
        bounds = np.flatnonzero(np.diff(table.types, prepend=-1, append=-1)).tolist()
        names = table.names.to_pylist()
        runs = [(names[int(table.types[a])], range(a, b)) for a, b in pairwise(bounds)]
    if store.has_features:
        runs.append((FEATURES, range(store.num_entities, store.num_rows)))
    return runs


class Ends:
    """Which types stand at the ends of each relation; candidates of these types.

    Args:
        store: A typed store.
    """

    label = "entities of the types that the relation has on that side"

    def __init__(self, store: TripleStore):
        types = EntityTypes.of(store)
        self.names: list[str] = types.names.to_pylist()
        self._entities, self._relations = store.entities, store.relations
        # Where each run of ids with one type starts, and N.
        self._bounds = np.flatnonzero(np.diff(types.types, prepend=-1, append=-1))
        self._more = np.empty((0, len(self.names)), bool)  # possible types of ids from N on
        self._type_of_run = types.types[self._bounds[:-1]].astype(np.int64)
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

    @classmethod
    def of(cls, store: TripleStore) -> Ends | None:
        """Return the ends by a store; None without one type per entity."""
        return cls(store) if store.size.typed else None

    def with_entities(self, types: np.ndarray, entities: Vocabulary) -> Ends:
        """Return the ends of a graph with more entities, behind the others.

        Args:
            types: (U, K) bool, the possible types of each.
            entities: The labels, those of the new entities included.
        """
        more = copy.copy(self)
        more._more, more._entities = types, entities
        return more

    def kinds(self, side: Side, relations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct sets of types (U, K) bool of relations (B,), and each one's (B,)."""
        sets, of_relation = self._sets[side]
        some, place = np.unique(of_relation.ravel()[relations], return_inverse=True)
        return sets[some], place

    def ranges(self, types: np.ndarray) -> np.ndarray:
        """Return the entities of types (K,) bool as ranges of ids: (S, 2), start and stop."""
        chosen = np.concatenate([[False], types[self._type_of_run], [False]])
        return self._bounds[np.diff(chosen)].reshape(-1, 2)

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Return which of the entities [first, stop) may be on a side: (n,) bool."""
        return self._allowed[side][relation, self.types_of(np.arange(first, stop))]

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Return whether each entity (B,) may be on a side of its relation (B,): (B,) bool."""
        allowed, is_new = self._allowed[side], entities >= self._bounds[-1]
        if not is_new.any():
            return allowed[relations, self.types_of(entities)]
        relations, entities = np.broadcast_arrays(relations, entities)
        fits = allowed[relations, self.types_of(np.where(is_new, 0, entities))]
        more = self._more[entities[is_new] - self._bounds[-1]]
        fits[is_new] = (allowed[relations[is_new]] & more).any(1)
        return fits

    def types_of(self, entities: np.ndarray) -> np.ndarray:
        """Return the type of each entity (B,), an index in ``names``: (B,) int64."""
        return self._type_of_run[np.searchsorted(self._bounds, entities, "right") - 1]

    def check(self, missing: str, queries: np.ndarray) -> None:
        """Check the types of the known entities of queries.

        Args:
            missing: The side that the queries ask for.
            queries: (B, 3) ids, of which the missing one counts for nothing.

        Raises:
            DataError: An entity is of a type that the relation does not have there.
        """
        side = OTHER[missing]
        entities, relations = queries[:, answer_column(side)], queries[:, RELATION]
        wrong = ~self.contain(side, relations, entities)
        if wrong.any():
            entity, relation = (int(ids[wrong.argmax()]) for ids in (entities, relations))
            right = [self.names[k] for k in np.flatnonzero(self._allowed[side][relation])]
            if entity < self._bounds[-1]:
                own = self.names[self.types_of(np.array([entity]))[0]]
            else:
                types = np.flatnonzero(self._more[entity - self._bounds[-1]])
                own = " or ".join(self.names[k] for k in types)
            raise DataError(
                f"the {side} {self._entities[entity]!r} is a {own}; "
                f"{self._relations[relation]!r} has a {' or '.join(right)} as its {side}"
            )
