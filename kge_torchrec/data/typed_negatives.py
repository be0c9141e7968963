"""Negatives that suit a query: of the right type, or from a file of triples known to be wrong.

For a triple and side, ``SeenSets`` has the entities that its relation has been seen with there in
train (the local closed-world assumption of Krompass et al. 2015), ``TypeSets`` those that share a
type with its true entity, ``OwnNegatives`` those of a file.  A chunk of triples shares its
negatives: each is drawn for one of its triples, picked at random, and counts for those that it
suits.  What is drawn is a function of a random number and of the chunk's triples, never of the
world size.

Shapes: C chunks, b triples a chunk, K negatives a chunk, B triples, M members, R relations.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import SIDES
from kge_torchrec.data.store.cardinality import OTHER, seen_pairs
from kge_torchrec.data.store.search import mark_members
from kge_torchrec.data.store.entity_types import EntityTypes
from kge_torchrec.data.store.filter_index import FilterIndex, SideIndex, build_side
from kge_torchrec.data.readers import read_triples
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError

log = logging.getLogger(__name__)
HEAD, RELATION, TAIL = range(3)


class SuitedSets(Protocol):
    """The entities that suit each triple on a side."""

    def draw(self, side: str, triples: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """One of each triple's (M, 3) entities by a number in [0, 1): (M,) int64; -1 for none."""

    def suit(self, side: str, triples: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Whether candidates (B, K) suit triples (B, 3): bool."""

    def keys(self, side: str, triples: np.ndarray) -> np.ndarray:
        """(B,) int64 from 0: triples of one key are suited by the same entities."""


class SuitedNegatives:
    """Replaces drawn negatives by such that suit, and says which ones do.

    share: of a chunk's drawn negatives that are replaced, the first ones.
    """

    def __init__(self, sets: SuitedSets, share: float):
        self._sets, self._share = sets, share

    def replace(self, side: str, ids: np.ndarray, unit: np.ndarray, triples: np.ndarray) -> None:
        """Overwrites the first of ids (C, K), drawn by ``unit`` (C, K), for triples (C, b, 3)."""
        chunks, count = len(ids), self.count(ids.shape[1])
        places = unit[:, :count] * triples.shape[1]
        number = np.minimum(places.astype(np.int64), triples.shape[1] - 1)
        picked = np.take_along_axis(triples, number[..., None], 1).reshape(-1, 3)
        rest = np.clip(places - number, 0, np.nextafter(1.0, 0.0))
        found = self._sets.draw(side, picked, rest.ravel()).reshape(chunks, count)
        ids[:, :count] = np.where(found >= 0, found, ids[:, :count])

    def unsuited(
        self, side: str, triples: np.ndarray, candidates: np.ndarray, drawn: int
    ) -> np.ndarray:
        """(B, K) bool: which candidates (C, K) are none for triples (B, 3), B / C for a chunk.

        drawn: of the candidates; those after them are of the batch, and have to suit where all
        drawn ones have to.
        """
        out = np.zeros((len(triples), candidates.shape[1]), bool)
        held = candidates if self._share == 1 else candidates[:, : self.count(drawn)]
        # Once for all triples of a chunk that the same entities suit.
        keys = self._sets.keys(side, triples)
        chunk = np.arange(len(triples)) // (len(triples) // len(candidates))
        pairs = chunk * (int(keys.max()) + 1) + keys
        _, first, of = np.unique(pairs, return_index=True, return_inverse=True)
        suit = self._sets.suit(side, triples[first], np.ascontiguousarray(held[chunk[first]]))
        np.logical_not(suit[of], out=out[:, : held.shape[1]])
        return out

    def count(self, drawn: int) -> int:
        """Of ``drawn`` negatives of a chunk, those that suit."""
        return max(1, round(self._share * drawn))


def answers_of(side: str, triples: np.ndarray) -> np.ndarray:
    """(B,) the true entities on a side of triples (B, 3)."""
    return triples[:, HEAD if side == "head" else TAIL]


class SeenSets:
    """The distinct entities of each relation and side in train: 4 bytes each, on every rank."""

    def __init__(self, store: TripleStore):
        dtype = store.train.dtype
        self._sets: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for side in SIDES:
            # Tails are the anchors of the index for heads, and the other way round.
            index = store.side_index("train", OTHER[side])
            pairs = [(e.astype(dtype), r.astype(dtype)) for e, r in seen_pairs(index)]
            entities, relations = (np.concatenate(x) for x in zip(*pairs, strict=True))
            order = np.argsort(relations, kind="stable")  # entities ascend within a relation
            indptr = np.zeros(store.num_relations + 1, np.int64)
            np.cumsum(np.bincount(relations, minlength=store.num_relations), out=indptr[1:])
            self._sets[side] = indptr, entities[order]

    def draw(self, side: str, triples: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """One of the entities seen there; -1 where there is no other than the true one."""
        indptr, entities = self._sets[side]
        start, stop = (indptr[triples[:, RELATION] + i] for i in (0, 1))
        found = entities[start + (unit * (stop - start)).astype(np.int64)].astype(np.int64)
        return np.where(stop - start > 1, found, -1)

    def suit(self, side: str, triples: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Whether candidates were seen there; all where none but the true one was."""
        indptr, entities = self._sets[side]
        start, stop = (indptr[triples[:, RELATION] + i] for i in (0, 1))
        found = np.zeros(candidates.shape, bool)
        mark_members(entities, start, stop, candidates, found)
        found[stop - start <= 1] = True
        return found

    def keys(self, side: str, triples: np.ndarray) -> np.ndarray:
        """The relation."""
        return triples[:, RELATION]


class TypeSets:
    """The entities of each type; one that has several in common is drawn as much more often."""

    def __init__(self, types: EntityTypes):
        self._types = types
        entities = np.repeat(np.arange(len(types.indptr) - 1), np.diff(types.indptr))
        sizes = np.bincount(types.types, minlength=len(types))
        self._members = entities[np.argsort(types.types, kind="stable")]
        self._starts = np.cumsum(sizes) - sizes
        # Over all pairs of entity and type: the members of the types before.
        self._before = np.concatenate([[0], np.cumsum(sizes[types.types])])

    def draw(self, side: str, triples: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """One that shares a type with the true entity; -1 where there is no other, or no type."""
        answers = answers_of(side, triples)
        first, last = (self._types.indptr[answers + i] for i in (0, 1))
        low, total = self._before[first], self._before[last] - self._before[first]
        target = low + (unit * total).astype(np.int64)
        pair = np.searchsorted(self._before, target, "right") - 1
        some = total > last - first  # more than the entity itself in each of its types
        out = np.full(len(answers), -1)
        pair, target = pair[some], target[some]
        place = self._starts[self._types.types[pair]] + target - self._before[pair]
        out[some] = self._members[place]
        return out

    def suit(self, side: str, triples: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Whether candidates share a type with the true entity; all where no other does."""
        answers = answers_of(side, triples)
        found = np.zeros(candidates.shape, bool)
        own = self._types
        _mark_alike(own.indptr, own.types, np.full(len(own), -1), answers, candidates, found)
        first, last = (own.indptr[answers + i] for i in (0, 1))
        found[self._before[last] - self._before[first] <= last - first] = True
        return found

    def keys(self, side: str, triples: np.ndarray) -> np.ndarray:
        """The true entity."""
        return answers_of(side, triples)


@numba.njit(cache=True, nogil=True)
def _mark_alike(
    indptr: np.ndarray,
    types: np.ndarray,
    seen_by: np.ndarray,
    answers: np.ndarray,
    candidates: np.ndarray,
    found: np.ndarray,
) -> None:
    """Sets ``found[b, k]`` where ``candidates[b, k]`` shares a type with ``answers[b]``."""
    for b in range(len(answers)):
        for place in range(indptr[answers[b]], indptr[answers[b] + 1]):
            seen_by[types[place]] = b
        for k in range(candidates.shape[1]):
            entity = candidates[b, k]
            for place in range(indptr[entity], indptr[entity + 1]):
                if seen_by[types[place]] == b:
                    found[b, k] = True
                    break


class OwnNegatives:
    """Triples that are known to be wrong: of a query (h, r, ?) the tails that they have, and so on.

    What is in train as well is left out, with a warning.
    """

    def __init__(self, triples: np.ndarray, store: TripleStore):
        known = store.filter_index(("train",))
        true = known.contains("tail", triples[:, HEAD], triples[:, RELATION], triples[:, TAIL:])
        if true.any():
            log.warning("%s of the own negatives are training triples; left out", int(true.sum()))
            triples = triples[~true[:, 0]]
        sizes = store.num_entities, store.num_relations
        index: dict[str, SideIndex] = {side: build_side(side, triples, *sizes) for side in SIDES}
        self._index = FilterIndex([index], *sizes)

    @classmethod
    def read(cls, path: str | Path, store: TripleStore) -> OwnNegatives:
        """From a file of triples; those of labels that are not in the graph are left out.

        Raises DataError for a file that cannot be read, and one that has none of the graph's.
        """
        parts, total = [np.empty((0, 3), np.int64)], 0
        vocabularies = store.entities.array, store.relations.array, store.entities.array
        for batch in read_triples(Path(path)):
            total += batch.num_rows
            places = [
                pc.index_in(column, value_set=pa.array(labels))
                for column, labels in zip(batch.columns[:3], vocabularies, strict=True)
            ]
            ids = np.stack([pc.fill_null(x, -1).to_numpy().astype(np.int64) for x in places], 1)
            parts.append(ids[(ids >= 0).all(1)])
        triples = np.concatenate(parts)
        if not len(triples):
            raise DataError(f"{path}: none of its {total:,} triples is of labels in the graph")
        if len(triples) < total:
            missing = total - len(triples)
            log.warning("%s: %s triples have labels that are not in the graph", path, missing)
        return cls(np.unique(triples, axis=0), store)

    def draw(self, side: str, triples: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """One that is known to be wrong; -1 where none is."""
        anchors = np.ascontiguousarray(answers_of(OTHER[side], triples))
        answers = self._index.answers(side, anchors, np.ascontiguousarray(triples[:, RELATION]))
        found, some = np.full(len(triples), -1), np.flatnonzero(answers.counts)
        if len(some):
            found[some] = answers.at(some, (unit * answers.counts)[some].astype(np.int64))
        return found

    def suit(self, side: str, triples: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """All: what is wrong for one triple is a negative like any other for the next."""
        return np.ones(candidates.shape, bool)

    def keys(self, side: str, triples: np.ndarray) -> np.ndarray:
        """All alike."""
        return np.zeros(len(triples), np.int64)


def make_suited(
    among: str, types: str | None, file: str | None, share: float, store: TripleStore
) -> SuitedNegatives | None:
    """What negatives.among names; None for all entities.

    Raises DataError for an unusable file, or a store without types.
    """
    if among == "all":
        return None
    if among == "seen":
        return SuitedNegatives(SeenSets(store), share)
    if among == "types":
        return SuitedNegatives(TypeSets(EntityTypes.find(types, store)), share)
    assert file is not None  # NegativesConfig has checked it
    return SuitedNegatives(OwnNegatives.read(file, store), share)
