"""The filter index: which answers of a query (anchor, relation, ?) are known to be true.

A query may have millions of answers, so nobody holds the answers of a batch: only where they start
and stop in the index.  As the ids of a range ascend, those within a block of entities are a smaller
range, found by binary search.  How often entities occur is read off it as well.

Shapes: Q queries, M answers, N entities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from kge_torchrec.data import SIDES
from kge_torchrec.data.search import find_ranges, mark_members, narrow
from kge_torchrec.data.sort import id_counts, sorted_rows

if TYPE_CHECKING:
    from kge_torchrec.data.store.search import QueryList


class SideIndex(NamedTuple):
    """One split's triples as rows sorted by (anchor, relation, answer); may be memory-mapped.

    The rows of anchor a are ``indptr[a]:indptr[a + 1]``.
    """

    indptr: np.ndarray  # (N + 1,) int64
    relations: np.ndarray  # (T,)
    entities: np.ndarray  # (T,) the answers


def build_side(side: str, triples: np.ndarray, num_entities: int, num_relations: int) -> SideIndex:
    """The index of ``triples`` (T, 3) that answers queries for ``side``."""
    heads, relations, tails = triples.T
    anchors, answers = (heads, tails) if side == "tail" else (tails, heads)
    sizes = (num_entities, num_relations, num_entities)
    anchors, relations, answers = sorted_rows((anchors, relations, answers), sizes)
    indptr = np.zeros(num_entities + 1, np.int64)
    np.cumsum(id_counts(anchors, num_entities), out=indptr[1:])
    return SideIndex(indptr, relations, answers)


class FilterIndex:
    """Known answers over one or more splits.

    Queries for side "tail" have heads as anchors and tails as answers; for side "head" tails are
    the anchors and heads the answers.
    """

    def __init__(
        self,
        indices: Sequence[Mapping[str, SideIndex]],
        num_entities: int,
        num_relations: int,
    ):
        self._indices: list[dict[str, SideIndex]] = [
            {side: SideIndex(*map(read_only, index[side])) for side in SIDES} for index in indices
        ]
        self.num_entities = num_entities
        self.num_relations = num_relations

    def answers(self, side: str, anchors: np.ndarray, relations: np.ndarray) -> Answers:
        """Where the known answers of B queries lie; one known from several splits is repeated.

        Args:
            side: "tail" or "head", the side asked for.
            anchors, relations: (B,) ids.

        Raises:
            IndexError: an id outside the store.
        """
        anchors, relations = self._checked(side, anchors, relations)
        query = np.arange(len(anchors))
        ranges = [
            Ranges(index[side].entities, query, *_ranges(index[side], anchors, relations))
            for index in self._indices
        ]
        return Answers(len(anchors), ranges)

    def contains(
        self, side: str, anchors: np.ndarray, relations: np.ndarray, candidates: np.ndarray
    ) -> np.ndarray:
        """Which candidates are known answers: (B, K) bool.

        Args:
            side: "tail" or "head", the side asked for.
            anchors, relations: (B,) ids.
            candidates: (B, K) entity ids, or (K,) shared by all queries.

        Raises:
            IndexError: an anchor or relation outside the store.
        """
        anchors, relations = self._checked(side, anchors, relations)
        candidates = np.asarray(candidates, np.int64)
        shape = (len(anchors), candidates.shape[-1])
        candidates = np.ascontiguousarray(np.broadcast_to(candidates, shape))
        found = np.zeros(shape, bool)
        for index in self._indices:
            starts, stops = _ranges(index[side], anchors, relations)
            mark_members(index[side].entities, starts, stops, candidates, found)
        return found

    def relations_between(self, head: int, tail: int) -> np.ndarray:
        """The relations (M,) int64 of the triples from one entity to another; some repeated."""
        found = []
        for index in self._indices:
            rows = slice(*index["tail"].indptr[head : head + 2])
            found.append(index["tail"].relations[rows][index["tail"].entities[rows] == tail])
        return np.concatenate(found).astype(np.int64)

    def queries(self, side: str) -> QueryList:
        """The distinct queries for a side.  Raises ValueError unless they are of one split."""
        # Imported on use: numba takes a second that others need not wait.
        from kge_torchrec.data.store.search import QueryList

        (index,) = self._indices
        return QueryList(index[side].indptr, index[side].relations)

    def _checked(
        self, side: str, anchors: np.ndarray, relations: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if side not in SIDES:
            raise ValueError(f"side must be 'head' or 'tail', not {side!r}")
        anchors = np.ascontiguousarray(anchors, np.int64)
        relations = np.ascontiguousarray(relations, np.int64)
        if anchors.ndim != 1 or anchors.shape != relations.shape:
            raise ValueError(
                f"anchors {anchors.shape} and relations {relations.shape} must both be (B,)"
            )
        for name, ids, size in (
            ("anchor", anchors, self.num_entities), ("relation", relations, self.num_relations),
        ):  # fmt: skip
            if len(ids) and (ids.min() < 0 or ids.max() >= size):
                raise IndexError(f"{name} ids must lie in [0, {size})")
        return anchors, relations


def _ranges(
    index: SideIndex, anchors: np.ndarray, relations: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return find_ranges(index.indptr, index.relations, anchors, relations)


# Answers handed out at once: a few arrays of this length fit a cache, and bound what is held.
PIECE = 1 << 17


class Ranges(NamedTuple):
    """Answers of some of the queries: of ``query[i]`` the ids ``ids[starts[i]:stops[i]]``."""

    ids: np.ndarray  # of entities, ascending within each range; may be memory-mapped
    query: np.ndarray  # (B,) int64, ascending
    starts: np.ndarray  # (B,) int64
    stops: np.ndarray  # (B,) int64


class Answers:
    """The answers of Q queries.

    parts: a query may have ranges in several of them; an answer that is in two is repeated.
    """

    def __init__(self, queries: int, parts: Sequence[Ranges]):
        self.queries = queries
        self.parts = [part._replace(ids=read_only(part.ids)) for part in parts]

    @classmethod
    def single(cls, entity: np.ndarray) -> Answers:
        """One answer a query: entity (Q,)."""
        place = np.arange(len(entity))
        return cls(len(entity), [Ranges(entity, place, place, place + 1)])

    @classmethod
    def joined(cls, several: Sequence[Answers]) -> Answers:
        """Those of all queries of ``several``, which are numbered one after another."""
        parts, first = [], 0
        for answers in several:
            parts += [part._replace(query=part.query + first) for part in answers.parts]
            first += answers.queries
        return cls(first, parts)

    @property
    def counts(self) -> np.ndarray:
        """(Q,) int64: the number of answers of each query."""
        counts = np.zeros(self.queries, np.int64)
        for part in self.parts:
            counts[part.query] += part.stops - part.starts
        return counts

    def between(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The answers among the entities from ``first`` to ``stop`` - 1, in no order.

        Returns query (M,) and entity (M,), both int64: entity[i] answers query[i].
        """
        return _concatenated([_gathered(part) for part in self._within(first, stop)])

    def pieces(self, first: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """``between`` in pieces of at most ``PIECE`` answers."""
        for part in self._within(first, stop):
            counts = part.stops - part.starts
            ends = np.cumsum(counts)
            for done in range(0, int(ends[-1]), PIECE):
                low, high = (np.clip(x - (ends - counts), 0, counts) for x in (done, done + PIECE))
                yield _gathered(part._replace(starts=part.starts + low, stops=part.starts + high))

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """All M answers: query (M,) int64, ascending, and entity (M,) int64."""
        query, entity = _concatenated([_gathered(part) for part in self.parts])
        if len(self.parts) > 1:
            order = np.argsort(query, kind="stable")
            query, entity = query[order], entity[order]
        return query, entity

    def at(self, query: np.ndarray, position: np.ndarray) -> np.ndarray:
        """(M,) int64: the position-th answer of each query (M,), in ascending order of answers.

        Raises ValueError unless all answers are in one part, which has a range for each query.
        """
        (part,) = self.parts
        return part.ids[part.starts[query] + position].astype(np.int64)

    def _within(self, first: int, stop: int) -> Iterator[Ranges]:
        """The parts with their ranges cut to some entities, those without any left out."""
        for part in self.parts:
            starts, stops = narrow(part.ids, part.starts, part.stops, first, stop)
            some = np.flatnonzero(stops > starts)
            if len(some):
                yield Ranges(part.ids, part.query[some], starts[some], stops[some])


def read_only(array: np.ndarray) -> np.ndarray:
    """A view like that of a mapped file, so that one compiled look-up serves both."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def _gathered(part: Ranges) -> tuple[np.ndarray, np.ndarray]:
    counts = part.stops - part.starts
    # Position within the query's range, plus where that range starts.
    position = np.repeat(part.starts - (np.cumsum(counts) - counts), counts)
    position += np.arange(len(position))
    return np.repeat(part.query, counts), part.ids[position].astype(np.int64)


def _concatenated(found: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if len(found) == 1:
        return found[0]
    nothing = np.empty(0, np.int64)
    query, entity = zip((nothing, nothing), *found, strict=True)
    return np.concatenate(query), np.concatenate(entity)


_CHUNK = 1 << 18  # entities looked at together


class Degrees:
    """How often each of N entities is head or tail of a training triple.

    The index has the number of rows before each anchor: added over both sides these are cumulative
    degrees, in files that all processes of a host map together; none holds a number per entity.

    heads, tails: (N + 1,) int64, how many triples have a head (a tail) below each id; may be
        memory-mapped.
    """

    def __init__(self, heads: np.ndarray, tails: np.ndarray):
        self.pointers = read_only(heads), read_only(tails)

    def __len__(self) -> int:
        return len(self.pointers[0]) - 1

    def between(self, first: int, stop: int) -> np.ndarray:
        """(n,) int64: of the entities from ``first`` to ``stop`` - 1."""
        heads, tails = (np.diff(pointer[first : stop + 1]) for pointer in self.pointers)
        heads += tails
        return heads

    def of(self, entities: np.ndarray) -> np.ndarray:
        """(M,) int64: of the entities (M,)."""
        return sum(pointer[entities + 1] - pointer[entities] for pointer in self.pointers)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """(N,) int64, all of them."""
        return self.between(0, len(self)).astype(dtype or np.int64, copy=False)

    def share(self, side: str, ids: np.ndarray) -> np.ndarray:
        """(...) int64 ids -> (...): the share of the training triples that have each there."""
        pointers = self.pointers[0 if side == "head" else 1]
        return (pointers[ids + 1] - pointers[ids]) / pointers[-1]

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """The different degrees, ascending, and how many entities have each; int64."""
        degrees, entities = np.empty((2, 0), np.int64)
        for first in range(0, len(self), _CHUNK):
            chunk = self.between(first, min(first + _CHUNK, len(self)))
            found = np.unique(chunk, return_counts=True)
            degrees, slot = np.unique(np.concatenate([degrees, found[0]]), return_inverse=True)
            entities = np.bincount(slot, np.concatenate([entities, found[1]])).astype(np.int64)
        return degrees, entities
