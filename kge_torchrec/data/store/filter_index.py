"""The filter index: which answers of a query (anchor, relation, ?) are known to be true.

A query may have millions of answers, so the answers of a batch are never copied: a batch holds
where they start and stop in the index.  The ids of a range ascend, so those within a block of
entities are a smaller range, found by binary search.  The degrees of entities are read off the
index as well.

Shapes: Q queries, M answers, N entities, T triples, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from kge_torchrec.data import SIDES
from kge_torchrec.data.sort import CHUNK, pack, pointers, sorted_rows, value_counts

if TYPE_CHECKING:
    from kge_torchrec.data.store.search import QueryList

FEW = 8  # queries looked up by numpy: `search`, which is compiled, takes a second to load


class SideIndex(NamedTuple):
    """One split's triples as rows sorted by (anchor, relation, answer); may be memory-mapped.

    Args:
        indptr: (N + 1,) int64; the rows of anchor a are ``indptr[a]:indptr[a + 1]``.
        relations: (T,) ids.
        entities: (T,) ids of the answers.
    """

    indptr: np.ndarray
    relations: np.ndarray
    entities: np.ndarray


def build_side(side: str, triples: np.ndarray, num_entities: int, num_relations: int) -> SideIndex:
    """Return the index of ``triples`` (T, 3) that answers queries for ``side``."""
    heads, relations, tails = triples.T
    anchors, answers = (heads, tails) if side == "tail" else (tails, heads)
    sizes = (num_entities, num_relations, num_entities)
    anchors, relations, answers = sorted_rows((anchors, relations, answers), sizes)
    return SideIndex(pointers(anchors, num_entities), relations, answers)


def build_indices(
    triples: Mapping[str, np.ndarray],
    num_entities: int,
    num_relations: int,
    on_built: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, SideIndex]]:
    """Return the index of each split and side; ``on_built`` is called after each."""
    indices: dict[str, dict[str, SideIndex]] = {}
    for split, part in triples.items():
        indices[split] = {}
        for side in SIDES:
            indices[split][side] = build_side(side, part, num_entities, num_relations)
            on_built()
    return indices


def seen_pairs(
    index: SideIndex, first: int = 0, stop: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the distinct pairs (entity, relation) that have answers, ordered by both.

    Args:
        index: The index of side "tail" for the heads of a relation, "head" for its tails.
        first: First entity to look at.
        stop: Entity at which to stop; None means all.

    Yields:
        Entities (M,) and relations (M,), int64, for a chunk of triples at a time.
    """
    stop = len(index.indptr) - 1 if stop is None else stop
    row, last = int(index.indptr[first]), int(index.indptr[stop])
    entity, before = first, (-1, -1)
    while row < last:
        end = min(row + CHUNK, last)
        # Entities up to the chunk's last row; the last one may continue in the next chunk.
        ending = int(np.searchsorted(index.indptr, end, "left"))
        bounds = np.clip(index.indptr[entity : ending + 1], row, end)
        entities = np.repeat(np.arange(entity, ending), np.diff(bounds))
        relations = np.asarray(index.relations[row:end], np.int64)
        new = np.ones(len(relations), bool)
        new[1:] = (relations[1:] != relations[:-1]) | (entities[1:] != entities[:-1])
        new[0] = before != (int(entities[0]), int(relations[0]))
        before = (int(entities[-1]), int(relations[-1]))
        yield entities[new], relations[new]
        row, entity = end, int(entities[-1])


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
        """Return where the known answers of queries lie; an answer of two splits is repeated.

        Args:
            side: The missing side, "tail" or "head".
            anchors: (Q,) entity ids.
            relations: (Q,) relation ids.

        Raises:
            IndexError: An id is outside the store.
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
        """Return which candidates are known answers: (Q, K) bool.

        Args:
            side: The missing side, "tail" or "head".
            anchors: (Q,) entity ids.
            relations: (Q,) relation ids.
            candidates: (Q, K) entity ids, or (K,) shared by all queries.

        Raises:
            IndexError: An anchor or relation is outside the store.
        """
        anchors, relations = self._checked(side, anchors, relations)
        candidates = np.asarray(candidates, np.int64)
        shape = (len(anchors), candidates.shape[-1])
        candidates = np.ascontiguousarray(np.broadcast_to(candidates, shape))
        is_known = np.zeros(shape, bool)
        for index in self._indices:
            starts, stops = _ranges(index[side], anchors, relations)
            mark_members(index[side].entities, starts, stops, candidates, is_known)
        return is_known

    def relations_between(self, head: int, tail: int) -> np.ndarray:
        """Return the relations (M,) int64 from one entity to another; some are repeated."""
        relations = []
        for index in self._indices:
            rows = slice(*index["tail"].indptr[head : head + 2])
            relations.append(index["tail"].relations[rows][index["tail"].entities[rows] == tail])
        return np.concatenate(relations).astype(np.int64)

    def queries(self, side: str) -> QueryList:
        """Return the distinct queries for a side.

        Raises:
            ValueError: The index is over more than one split.
        """
        # Imported here: numba takes a second to load.
        from kge_torchrec.data.store.search import QueryList

        (index,) = self._indices
        return QueryList(index[side].indptr, index[side].relations)

    def packed(self) -> np.ndarray:
        """Return the keys of all facts by head, relation and tail, ascending, uint64; see `pack`.

        Raises:
            ValueError: The ids do not fit 64 bits.
        """
        sizes = self.num_entities, self.num_relations, self.num_entities
        keys = []
        for index in self._indices:
            rows = index["tail"]
            heads = np.repeat(np.arange(self.num_entities), np.diff(rows.indptr))
            key = pack((heads, rows.relations, rows.entities), sizes)
            if key is None:
                raise ValueError("the ids of a triple do not fit 64 bits")
            keys.append(key)
        return keys[0] if len(keys) == 1 else np.unique(np.concatenate(keys))

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
    """Return where the answers of queries start (Q,) and stop (Q,)."""
    rows = index.indptr[anchors], index.indptr[anchors + 1]
    return _bounds(index.relations, *rows, relations, relations + 1)


def _bounds(
    values: np.ndarray, starts: np.ndarray, stops: np.ndarray, lows: np.ndarray, highs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return where the values from low to high - 1 lie in ascending ranges, as `search.bounds`."""
    if len(starts) > FEW:
        from kge_torchrec.data.store import search

        return search.bounds(values, starts, stops, lows, highs)
    bounds = np.empty((2, len(starts)), np.int64)
    for query, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        # Of the values' type, or numpy would convert the whole range; high itself may not fit.
        low, last = np.array([lows[query], highs[query] - 1]).astype(values.dtype)
        rows = values[start:stop]
        bounds[:, query] = np.searchsorted(rows, low), np.searchsorted(rows, last, "right")
    return bounds[0] + starts, bounds[1] + starts


def mark_members(
    entities: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    candidates: np.ndarray,
    is_member: np.ndarray,
) -> None:
    """Set ``found[q, k]`` where ``candidates[q, k]`` is in the ascending range of query q."""
    if len(starts) > FEW:
        from kge_torchrec.data.store import search

        search.mark_members(entities, starts, stops, candidates, is_member)
        return
    for query, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        answers, candidate = entities[start:stop], candidates[query].astype(entities.dtype)
        place = np.searchsorted(answers, candidate)
        inside = np.flatnonzero(place < len(answers))
        is_member[query, inside] |= answers[place[inside]] == candidate[inside]


# Answers returned at once: a few arrays of this length fit a cache and bound the memory.
PIECE = 1 << 17


class Ranges(NamedTuple):
    """Answers of some queries: those of ``query[i]`` are ``ids[starts[i]:stops[i]]``.

    Args:
        ids: Entities, ascending within each range; may be memory-mapped.
        query: int64, ascending.
        starts, stops: int64.
    """

    ids: np.ndarray
    query: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Answers:
    """The answers of Q queries.

    Args:
        queries: Q.
        parts: Ranges; a query may have one in several parts, and an answer in two is repeated.
    """

    def __init__(self, queries: int, parts: Sequence[Ranges]):
        self.queries = queries
        self.parts = [part._replace(ids=read_only(part.ids)) for part in parts]

    @classmethod
    def single(cls, entity: np.ndarray) -> Answers:
        """Return answers with one entity (Q,) per query."""
        place = np.arange(len(entity))
        return cls(len(entity), [Ranges(entity, place, place, place + 1)])

    @classmethod
    def merged(cls, several: Sequence[Answers]) -> Answers:
        """Return the answers that each query has in any of several."""
        return cls(several[0].queries, [part for answers in several for part in answers.parts])

    @classmethod
    def joined(cls, several: Sequence[Answers]) -> Answers:
        """Return the answers of several groups of queries, numbered one after another."""
        parts, first = [], 0
        for answers in several:
            parts += [part._replace(query=part.query + first) for part in answers.parts]
            first += answers.queries
        return cls(first, parts)

    @property
    def counts(self) -> np.ndarray:
        """Number of answers of each query, (Q,) int64."""
        counts = np.zeros(self.queries, np.int64)
        for part in self.parts:
            counts[part.query] += part.stops - part.starts
        return counts

    def between(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the answers among the entities from ``first`` to ``stop`` - 1, in no order.

        Returns:
            Query (M,) and entity (M,), both int64: entity[i] answers query[i].
        """
        return gathered(self._within(first, stop))

    def pieces(self, first: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield what ``between`` returns in pieces of at most ``PIECE`` answers."""
        for part in self._within(first, stop):
            counts = part.stops - part.starts
            ends = np.cumsum(counts)
            for done in range(0, int(ends[-1]), PIECE):
                low, high = (np.clip(x - (ends - counts), 0, counts) for x in (done, done + PIECE))
                yield gathered([part._replace(starts=part.starts + low, stops=part.starts + high)])

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all answers: query (M,) int64, ascending, and entity (M,) int64."""
        query, entity = gathered(self.parts)
        if len(self.parts) > 1:
            order = np.argsort(query, kind="stable")
            query, entity = query[order], entity[order]
        return query, entity

    def at(self, query: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the position-th answer of each query (M,), in ascending order: (M,) int64.

        Raises:
            ValueError: The answers are in more than one part.
        """
        (part,) = self.parts
        return part.ids[part.starts[query] + position].astype(np.int64)

    def _within(self, first: int, stop: int) -> Iterator[Ranges]:
        """Yield the parts with their ranges cut to some entities, without empty ranges."""
        for part in self.parts:
            ends = (np.full(len(part.starts), end) for end in (first, stop))
            starts, stops = _bounds(part.ids, part.starts, part.stops, *ends)
            some = np.flatnonzero(stops > starts)
            if len(some):
                yield Ranges(part.ids, part.query[some], starts[some], stops[some])


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view like that of a mapped file, so that one compiled search serves both."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def gathered(parts: Iterable[Ranges]) -> tuple[np.ndarray, np.ndarray]:
    """Return the answers of parts: query (M,), ascending in each part, and entity (M,), int64."""
    query, entity = [], []
    for part in parts:
        counts = part.stops - part.starts
        # Position within the query's range, plus where that range starts.
        position = np.repeat(part.starts - (np.cumsum(counts) - counts), counts)
        position += np.arange(len(position))
        query.append(np.repeat(part.query, counts))
        entity.append(part.ids[position].astype(np.int64))
    if len(query) == 1:
        return query[0], entity[0]
    nothing = np.empty(0, np.int64)
    return np.concatenate([nothing, *query]), np.concatenate([nothing, *entity])


_CHUNK = 1 << 18  # entities counted at once


class Degrees:
    """How often each of N entities is head or tail of a training triple.

    The index has the number of rows before each anchor.  Added over both sides these are cumulative
    degrees, in files that all processes of a host map together, so no process holds a number per
    entity.

    Args:
        heads, tails: (N + 1,) int64, how many triples have a head (a tail) below each id; may be
            memory-mapped.
    """

    def __init__(self, heads: np.ndarray, tails: np.ndarray):
        self.pointers = read_only(heads), read_only(tails)

    def __len__(self) -> int:
        return len(self.pointers[0]) - 1

    def between(self, first: int, stop: int) -> np.ndarray:
        """Return the degrees of the entities from ``first`` to ``stop`` - 1, int64."""
        heads, tails = (np.diff(pointer[first : stop + 1]) for pointer in self.pointers)
        heads += tails
        return heads

    def of(self, entities: np.ndarray) -> np.ndarray:
        """Return the degrees (M,) int64 of some entities (M,)."""
        return sum(pointer[entities + 1] - pointer[entities] for pointer in self.pointers)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Return all degrees, (N,) int64."""
        return self.between(0, len(self)).astype(dtype or np.int64, copy=False)

    @property
    def triples(self) -> int:
        """T, the training triples."""
        return int(self.pointers[0][-1])

    def share(self, side: str, ids: np.ndarray) -> np.ndarray:
        """Return the share of the training triples that have each entity, ids (...), on a side."""
        pointers = self.pointers[0 if side == "head" else 1]
        return (pointers[ids + 1] - pointers[ids]) / pointers[-1]

    def histogram(self, ids: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct degrees, ascending, and how many entities have each; int64.

        Args:
            ids: The entities that count; all by default.
        """
        ids = range(len(self)) if ids is None else ids
        starts = range(ids.start, ids.stop, _CHUNK)
        return value_counts(self.between(i, min(i + _CHUNK, ids.stop)) for i in starts)
