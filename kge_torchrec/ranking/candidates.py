"""Candidates restricted to entities that fit the relation and the side of a query.

``SeenCandidates`` are the entities that train has on that side of the relation: its domain or
range (the local closed-world assumption of Krompass et al. 2015). ``TypedCandidates`` also include
every entity that shares a type with one of them. Ranks among restricted candidates are better than
ranks among all entities, so every report must name the restriction (``label``).

A true answer outside the candidates is not added, since that would leak the answer. It stays in
the test set and gets the last rank, N.

Shapes: N entities, n entities of a block, B queries, R relations, K types, M pairs.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kge_torchrec.data import OTHER
from kge_torchrec.data.sort import chunks, pointers
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import anchors_of, relations_of
from kge_torchrec.data.types import EntityTypes
from kge_torchrec.models.scorers.base import SIDES, Side


class Candidates(Protocol):
    """The entities that a query is ranked among."""

    label: str  # a description of the restriction, for reports

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Return which of the entities [first, stop) are candidates: (n,) bool."""

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Return whether each entity is a candidate of its query: (B,) bool.

        Args:
            side: The side of the queries.
            relations: (B,) int64, the relations of the queries.
            entities: (B,) int64.
        """


class SeenCandidates:
    """Entities that train has on that side of the relation.

    It keeps the (relation, entity) pairs of this rank's rows and looks up the others.

    Args:
        store: The data.
        rows: (first, stop), the entities that ``mask`` can be called for.
    """

    label = "entities seen with the relation on that side in train"

    def __init__(self, store: TripleStore, rows: tuple[int, int]):
        self._train = store.filter_index(("train",))
        self._rows, self._seen = rows, {}
        for side in SIDES:
            # The anchors of the head index are tails, and those of the tail index are heads.
            index = store.side_index("train", OTHER[side])
            queries = index.queries[index.between(*rows)]
            relations = relations_of(queries)
            order = np.argsort(relations, kind="stable")
            indptr = pointers(relations, store.num_relations)
            self._seen[side] = indptr, anchors_of(queries)[order]

    def entities(self, side: Side, relation: int) -> np.ndarray:
        """Return the entities of ``rows`` that train has on that side: (M,) int64, ascending."""
        indptr, entities = self._seen[side]
        return entities[indptr[relation] : indptr[relation + 1]]

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Return which of the entities [first, stop) are candidates: (n,) bool.

        [first, stop) must lie within ``rows``.
        """
        return _mask(self.entities(side, relation), first, stop)

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Return whether each entity (B,) is a candidate of its query: (B,) bool."""
        return self._train.answers(OTHER[side], entities, relations).counts > 0


class TypedCandidates(SeenCandidates):
    """Entities seen on that side of the relation, and entities that share a type with one of them.

    An entity without a type is a candidate only if it was seen itself.

    Args:
        store: The data.
        rows: (first, stop), the entities that ``mask`` can be called for.
        types: The types of the entities.
        source: Where the types come from, for ``label``.
    """

    def __init__(self, store: TripleStore, rows: tuple[int, int], types: EntityTypes, source: str):
        super().__init__(store, rows)
        self.label = (
            f"entities of the types ({source}) seen with the relation on that side in train"
        )
        self._types = types
        self._allowed = {
            side: self._pairs_of_types(store, side) for side in SIDES
        }  # per side (M,) ascending: relation * K + type

    def _pairs_of_types(self, store: TripleStore, side: Side) -> np.ndarray:
        pairs = np.empty(0, np.int64)
        for queries in chunks(store.side_index("train", OTHER[side]).queries):
            which, types = self._types.of(anchors_of(queries))
            keys = relations_of(queries)[which] * len(self._types) + types
            pairs = np.union1d(pairs, keys)
        return pairs

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Return which of the entities [first, stop) are candidates: (n,) bool.

        [first, stop) must lie within ``rows``.
        """
        allowed = self._allowed[side]
        size = len(self._types)
        low, high = np.searchsorted(allowed, (relation * size, (relation + 1) * size))
        good = np.zeros(size, bool)
        good[allowed[low:high] - relation * size] = True
        which, types = self._types.of(np.arange(first, stop))
        mask = super().mask(side, relation, first, stop)
        mask[which[good[types]]] = True
        return mask

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Return whether each entity (B,) is a candidate of its query: (B,) bool."""
        which, types = self._types.of(entities)
        allowed, keys = self._allowed[side], relations[which] * len(self._types) + types
        are_candidates = super().contain(side, relations, entities)
        are_candidates[which[np.isin(keys, allowed)]] = True
        return are_candidates


class ListedCandidates:
    """The same entities (M,), int64, for every query."""

    label = "entities of a list"

    def __init__(self, entities: np.ndarray):
        self._entities = np.unique(entities)

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Return which of the entities [first, stop) are candidates: (n,) bool."""
        return _mask(self._entities, first, stop)

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Return whether each entity (B,) is a candidate: (B,) bool."""
        return np.isin(entities, self._entities)


class WithoutListed:
    """The candidates of others (None: all entities) without some entities (M,), int64."""

    def __init__(self, others: Candidates | None, left_out: np.ndarray):
        self._others, self._left_out = others, np.unique(left_out)
        self.label = f"{'all entities' if others is None else others.label}, without a list"

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Return which of the entities [first, stop) are candidates: (n,) bool."""
        mask = ~_mask(self._left_out, first, stop)
        if self._others is not None:
            mask &= self._others.mask(side, relation, first, stop)
        return mask

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Return whether each entity (B,) is a candidate: (B,) bool."""
        mask = ~np.isin(entities, self._left_out)
        if self._others is not None:
            mask &= self._others.contain(side, relations, entities)
        return mask


def _mask(entities: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return which ids of [first, stop) are among ascending ``entities``: (n,) bool."""
    low, high = np.searchsorted(entities, (first, stop))
    mask = np.zeros(stop - first, bool)
    mask[entities[low:high] - first] = True
    return mask


def make_candidates(
    kind: str, types: str | None, store: TripleStore, rows: tuple[int, int]
) -> Candidates | None:
    """Build the candidates that ``evaluation.candidates`` names; None for all entities.

    Args:
        kind: "all", "seen" or "types".
        types: The file of entity types; None uses the types of the store.
        store: The data.
        rows: (first, stop), the rows of this rank.

    Raises:
        DataError: The file of types cannot be used, or the store has no types.
    """
    if kind == "all":
        return None
    if kind == "seen":
        return SeenCandidates(store, rows)
    source = types or "of the store"
    return TypedCandidates(store, rows, EntityTypes.find(types, store), source)
