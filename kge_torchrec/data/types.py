"""Types of entities, such as user and item: of a store or a file, and at the ends of relations.

An entity may have several types.  A store is typed if each entity has one: then the ids of a type
are runs, and relations know the types of their ends.  `type_sources` says where types come from.

Shapes: N entities, K types, M pairs of an entity and a type, B queries.
"""

from __future__ import annotations

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
from kge_torchrec.data.readers.lists import read_types
from kge_torchrec.data.sort import pointers, sorted_rows
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import Ranges, gathered
from kge_torchrec.errors import DataError


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
        cls, names: pa.Array, entities: np.ndarray, types: np.ndarray, num_entities: int
    ) -> EntityTypes:
        """Return the types from pairs of entity (M,) and type (M,), in any order, with repeats."""
        entities, types = sorted_rows((entities, types), (num_entities, len(names)))
        new = np.ones(len(types), bool)
        new[1:] = (np.diff(entities) != 0) | (np.diff(types) != 0)
        return cls(names, pointers(entities[new], num_entities), types[new])

    @classmethod
    def read(cls, path: str | Path, store: TripleStore) -> EntityTypes:
        """Read a file of lines "entity, tab, type", without entities that are not in the graph.

        Raises:
            DataError: The file is missing, has other columns or none of the graph's entities.
        """
        table = read_types(Path(path))
        place = pc.index_in(table["entity"], value_set=store.entities.array)
        known = place.is_valid().to_numpy()
        if not known.any():
            raise DataError(
                f"{path}: none of its {len(table):,} entities is in the graph; a line should be an "
                "entity's label, a tab and a type"
            )
        encoded = table["type"].combine_chunks().dictionary_encode()
        entities = place.drop_null().to_numpy().astype(np.int64)
        types = encoded.indices.to_numpy().astype(np.int64)[known]
        return cls.of_pairs(encoded.dictionary, entities, types, store.num_entities)

    @classmethod
    def find(cls, path: str | Path | None, store: TripleStore) -> EntityTypes:
        """Return the types of a file or, where ``path`` is None, of the store.

        Raises:
            DataError: The file is unusable (see ``read``), or the store has no types.
        """
        if path is not None:
            return cls.read(path, store)
        table = store.types()
        if table is None:
            raise DataError(
                f"{store.path} has no types of entities: prepare it again with data.types, "
                "or name a file of lines entity, tab, type"
            )
        return cls(*table)

    def __len__(self) -> int:
        return len(self.names)

    def pairs(self) -> np.ndarray:
        """Return the pairs of entity and type, (M, 2) int64."""
        entities = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        return np.stack([entities, self.types], 1)

    def of(self, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the types of entities (B,): which of the B (M,), ascending, and its type (M,)."""
        ends = self.indptr[entities], self.indptr[entities + 1]
        return gathered([Ranges(self.types, np.arange(len(entities)), *ends)])


def runs_of_types(store: TripleStore) -> list[tuple[str, range]]:
    """Return the runs of consecutive ids of one type, in order of ids, with the type's label.

    An extended store may have several runs of a type.  Entities without types are one run, and
    features another one behind all entities.
    """
    runs = [(ENTITY, range(store.num_entities))]
    if store.size.typed:
        table = EntityTypes.find(None, store)
        bounds = np.flatnonzero(np.diff(table.types, prepend=-1, append=-1)).tolist()
        names = table.names.to_pylist()
        runs = [(names[int(table.types[a])], range(a, b)) for a, b in pairwise(bounds)]
    if store.has_features:
        runs.append((FEATURES, range(store.num_entities, store.num_rows)))
    return runs


class Ends:
    """Which types stand at the ends of each relation.

    Args:
        store: A store in which every entity has one type.
    """

    def __init__(self, store: TripleStore):
        types = EntityTypes.find(None, store)
        self._store, self._types, self.names = store, types.types, types.names.to_pylist()
        bounds = np.flatnonzero(np.diff(types.types, prepend=-1, append=-1))
        self._bounds, self._type_of_run = bounds, types.types[bounds[:-1]]
        shape = store.num_relations, len(self.names)
        self._allowed = {side: np.zeros(shape, bool) for side in SIDES}
        ends = store.report["types"]["ends"]
        for relation, label in enumerate(store.relations.array.to_pylist()):
            # A relation that train does not have may have any ends.
            for pair in ends.get(label) or ([name, name] for name in self.names):
                for side, name in zip(SIDES, pair, strict=True):
                    self._allowed[side][relation, self.names.index(name)] = True

    @classmethod
    def of(cls, store: TripleStore | None) -> Ends | None:
        """Return the ends by a store; None without a store, or without one type per entity."""
        return cls(store) if store is not None and store.size.typed else None

    def kinds(self, side: Side, relations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct sets of types (U, K) bool of relations (B,), and each one's (B,)."""
        sets, place = np.unique(self._allowed[side][relations], axis=0, return_inverse=True)
        return sets, place.reshape(-1)

    def ranges(self, types: np.ndarray) -> np.ndarray:
        """Return the entities of types (K,) bool as ranges of ids: (S, 2), start and stop."""
        chosen = np.concatenate([[False], types[self._type_of_run], [False]])
        return self._bounds[np.diff(chosen)].reshape(-1, 2)

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
        wrong = ~self._allowed[side][relations, self._types[entities]]
        if wrong.any():
            entity, relation = (int(ids[wrong.argmax()]) for ids in (entities, relations))
            right = [self.names[k] for k in np.flatnonzero(self._allowed[side][relation])]
            own = self.names[self._types[entity]]
            raise DataError(
                f"the {side} {self._store.entities[entity]!r} is a {own}; "
                f"{self._store.relations[relation]!r} has a {' or '.join(right)} as its {side}"
            )
