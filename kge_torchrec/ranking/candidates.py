"""Candidates that are restricted to entities which suit a query's relation and side.

``SeenCandidates`` are the entities that a relation has been seen with on that side in train, its
domain or range (the local closed-world assumption of Krompass et al. 2015); ``TypedCandidates`` are
those and all that share a type with one of them.  Ranks among them are better than among all
entities, so whatever reports them has to say so: ``label`` is for that.

A true answer that is no candidate is not made one: whoever restricts candidates never offers it,
and adding it would tell the answer.  It stays in the test set and has the last rank of all
entities.

Shapes: N entities, n entities of a block, B queries, R relations, K types, M pairs.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kge_torchrec.data import OTHER
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.entity_types import EntityTypes
from kge_torchrec.data.store.filter_index import seen_pairs
from kge_torchrec.models.scorers.base import SIDES, Side


class Candidates(Protocol):
    """Which entities a query is ranked among."""

    label: str  # for people: what the candidates are restricted to

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Which of the entities from ``first`` to ``stop`` - 1 are candidates: (n,) bool."""

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Whether entities (B,) are candidates of queries for a side of relations (B,): bool."""


class SeenCandidates:
    """Entities that the relation has been seen with on that side in train.

    Holds the pairs of relation and entity of a rank's own rows, and looks all others up.

    rows: (first, stop) of the entities whose ``mask`` will be asked for.
    """

    label = "entities seen with the relation on that side in train"

    def __init__(self, store: TripleStore, rows: tuple[int, int]):
        self._train = store.filter_index(("train",))
        self._rows, self._seen = rows, {}
        for side in SIDES:
            # Tails are the anchors of the index for heads, and the other way round.
            pairs = list(seen_pairs(store.side_index("train", OTHER[side]), *rows))
            entities, relations = (
                np.concatenate([np.empty(0, np.int64), *column])
                for column in (zip(*pairs, strict=True) if pairs else ((), ()))
            )
            indptr = np.zeros(store.num_relations + 1, np.int64)
            np.cumsum(np.bincount(relations, minlength=store.num_relations), out=indptr[1:])
            self._seen[side] = indptr, entities[np.argsort(relations, kind="stable")]

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Which of the entities from ``first`` to ``stop`` - 1, of ``rows``, are candidates."""
        indptr, entities = self._seen[side]
        seen = entities[indptr[relation] : indptr[relation + 1]]
        low, high = np.searchsorted(seen, (first, stop))
        mask = np.zeros(stop - first, bool)
        mask[seen[low:high] - first] = True
        return mask

    def contain(self, side: Side, relations: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """Whether entities (B,) are candidates of queries for a side of relations (B,)."""
        return self._train.answers(OTHER[side], entities, relations).counts > 0


class TypedCandidates(SeenCandidates):
    """Entities that have a type in common with one that was seen there, and those seen.

    An entity without a type is a candidate only where it was seen itself.
    """

    def __init__(self, store: TripleStore, rows: tuple[int, int], types: EntityTypes, source: str):
        super().__init__(store, rows)
        self.label = (
            f"entities of the types ({source}) seen with the relation on that side in train"
        )
        self._types = types
        self._allowed = {
            side: self._pairs_of_types(store, side) for side in SIDES
        }  # of each side, (M,) ascending: relation * K + type

    def _pairs_of_types(self, store: TripleStore, side: Side) -> np.ndarray:
        found = np.empty(0, np.int64)
        for entities, relations in seen_pairs(store.side_index("train", OTHER[side])):
            which, types = self._types.of(entities)
            found = np.union1d(found, relations[which] * len(self._types) + types)
        return found

    def mask(self, side: Side, relation: int, first: int, stop: int) -> np.ndarray:
        """Which of the entities from ``first`` to ``stop`` - 1, of ``rows``, are candidates."""
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
        """Whether entities (B,) are candidates of queries for a side of relations (B,)."""
        which, types = self._types.of(entities)
        allowed, wanted = self._allowed[side], relations[which] * len(self._types) + types
        found = super().contain(side, relations, entities)
        found[which[np.isin(wanted, allowed)]] = True
        return found


def make_candidates(
    kind: str, types: str | None, store: TripleStore, rows: tuple[int, int]
) -> Candidates | None:
    """What evaluation.candidates names, for a rank that holds the rows (first, stop).

    types: a file; None stands for those of the store.  Returns None for all entities.  Raises
    DataError for an unusable file of types, or a store without.
    """
    if kind == "all":
        return None
    if kind == "seen":
        return SeenCandidates(store, rows)
    source = types or "of the store"
    return TypedCandidates(store, rows, EntityTypes.find(types, store), source)
