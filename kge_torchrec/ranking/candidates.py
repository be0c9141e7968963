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
from kge_torchrec.data.sort import chunks
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import Ranges, anchors_of, keys_of, relations_of
from kge_torchrec.data.types import types_of
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


class Frequencies:
    """In how many training triples of a relation each entity is on a side.

    It keeps the (relation, entity) pairs of this rank's rows and looks up the others.

    Args:
        store: The data.
        rows: (first, stop), the entities of this rank.
    """

    def __init__(self, store: TripleStore, rows: tuple[int, int]):
        self._train, self._pairs, self._places = store.filter_index(("train",)), {}, {}
        for side in SIDES:
            # The anchors of the head index are tails, and those of the tail index are heads.
            index = store.side_index("train", OTHER[side])
            own = index.between(*rows)
            queries, counts = index.queries[own], np.diff(index.starts[own.start : own.stop + 1])
            keys = keys_of(relations_of(queries), anchors_of(queries))
            order = np.argsort(keys)
            self._pairs[side] = keys[order], counts[order]
            self._places[side] = np.arange(len(keys))

    def pairs(self, side: Side, relation: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the entities of ``rows`` that are there, ascending, and their counts: (M,)."""
        keys, counts = self._pairs[side]
        own = slice(*np.searchsorted(keys, np.array([relation, relation + 1]) << 32))
        return keys[own] & 0xFFFFFFFF, counts[own]

    def within(self, side: Side, relations: np.ndarray, first: int, stop: int) -> np.ndarray:
        """Return the counts (B, n) int64 of the entities [first, stop), which lie in ``rows``."""
        keys, counts = self._pairs[side]
        ends = (np.searchsorted(keys, keys_of(relations, np.int64(end))) for end in (first, stop))
        row, place = Ranges(self._places[side], *ends).gathered()
        found = np.zeros((len(relations), stop - first), np.int64)
        found[row, (keys[place] & 0xFFFFFFFF) - first] = counts[place]
        return found

    def of(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Return the counts (B,) int64 of any entities (B,) in triples of relations (B,)."""
        return self._train.answers(OTHER[side], entities, relations).counts


class SeenCandidates:
    """Entities that train has on that side of the relation."""

    label = "entities seen with the relation on that side in train"

    def __init__(self, frequencies: Frequencies):
        self._frequencies = frequencies

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        return self._frequencies.within(side, np.array([relation]), first, stop)[0] > 0

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        return self._frequencies.of(side, relations, entities) > 0


class TypedCandidates(SeenCandidates):
    """Entities seen on that side of the relation, and entities that share a type with one of them.

    An entity without a type is a candidate only if it was seen itself.

    Args:
        frequencies: What train has.
        store: The data.

    Raises:
        DataError: The store has no types.
    """

    label = "entities of the types seen with the relation on that side in train"

    def __init__(self, frequencies: Frequencies, store: TripleStore):
        super().__init__(frequencies)
        self._types = types_of(store)
        self._allowed = {
            side: self._pairs_of_types(store, side) for side in SIDES
        }  # per side (M,) ascending: relation * K + type

    def _pairs_of_types(self, store: TripleStore, side: Side) -> np.ndarray:
        pairs = np.empty(0, np.int64)
        for queries in chunks(store.side_index("train", OTHER[side]).queries):
            which, types = self._types.of(anchors_of(queries))
            keys = relations_of(queries)[which] * len(self._types.names) + types
            pairs = np.union1d(pairs, keys)
        return pairs

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        allowed = self._allowed[side]
        size = len(self._types.names)
        low, high = np.searchsorted(allowed, (relation * size, (relation + 1) * size))
        good = np.zeros(size, bool)
        good[allowed[low:high] - relation * size] = True
        which, types = self._types.of(np.arange(first, stop))
        mask = super().mask(side, relation, first, stop)
        mask[which[good[types]]] = True
        return mask

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        which, types = self._types.of(entities)
        allowed, keys = self._allowed[side], relations[which] * len(self._types.names) + types
        are_candidates = super().contain(side, relations, entities)
        are_candidates[which[np.isin(keys, allowed)]] = True
        return are_candidates


class ListedCandidates:
    """The same entities (M,), int64, for every query."""

    label = "entities of a list"

    def __init__(self, entities: np.ndarray):
        self._entities = np.unique(entities)

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        low, high = np.searchsorted(self._entities, (first, stop))
        mask = np.zeros(stop - first, bool)
        mask[self._entities[low:high] - first] = True
        return mask

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        return np.isin(entities, self._entities)
