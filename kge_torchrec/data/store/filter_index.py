"""The filter index: which answers of a query (anchor, relation, ?) are known to be true.

A query may have millions of answers, so the answers of a batch are never copied: a batch holds
where they start and stop in the index.  The ids of a range ascend, so those within a block of
entities are a smaller range, found by binary search.

Shapes: Q queries, B queries that are looked up, M answers, N entities, T triples, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kge_torchrec.data import RELATION, SIDES, TAIL, answer_column
from kge_torchrec.data.sort import sorted_rows

FEW = 8  # queries looked up by numpy: `search`, which is compiled, takes half a second to load


def keys_of(anchors: np.ndarray, relations: np.ndarray) -> np.ndarray:
    """Return a number (B,) int64 per query that orders like anchor, then relation."""
    keys = np.array(anchors, np.int64)
    keys <<= 32
    keys |= relations
    return keys


def anchors_of(keys: np.ndarray) -> np.ndarray:
    """Return the anchors (B,) int64 of the queries with some keys."""
    return keys >> 32


def relations_of(keys: np.ndarray) -> np.ndarray:
    """Return the relations (B,) int64 of the queries with some keys."""
    return keys & 0xFFFFFFFF


class SideIndex(NamedTuple):
    """The triples of one split by (anchor, relation, answer); may be memory-mapped."""

    queries: np.ndarray  # (Q,) int64, the keys of the distinct queries (``keys_of``), ascending
    starts: np.ndarray  # (Q + 1,) int64, of each query's answers
    answers: np.ndarray  # (T,) entities, ascending for each query

    def find(self, anchors: np.ndarray, relations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the answers of queries start (B,) and stop (B,)."""
        place, is_known = _places(self.queries, keys_of(anchors, relations))
        return self.starts[place], self.starts[place + is_known]

    def answers_to(self, numbers: np.ndarray) -> Answers:
        """Return the answers of queries (B,) by their places in ``queries``."""
        ranges = Ranges(self.answers, self.starts[numbers], self.starts[numbers + 1])
        return Answers(len(numbers), [ranges])

    def between(self, first: int, stop: int) -> slice:
        """Return which queries have anchors from ``first`` to ``stop`` - 1."""
        return slice(*np.searchsorted(self.queries, np.array([first, stop]) << 32).tolist())


def _places(ascending: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each number among ascending ones of its type, and if it is there."""
    place = np.searchsorted(ascending, wanted)
    is_there = place < len(ascending)
    is_there[is_there] = ascending[place[is_there]] == wanted[is_there]
    return place, is_there


def build_side(side: str, triples: np.ndarray) -> SideIndex:
    """Return the index of ``triples`` (T, 3) that answers queries for ``side``."""
    anchor = TAIL - answer_column(side)
    columns = [triples[:, column] for column in (anchor, RELATION, answer_column(side))]
    low = int(columns[0].min()) if len(triples) else 0
    if low:  # in a part of a graph, anchors are close: keys are shorter
        columns[0] = columns[0] - low
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    anchors, relations, answers = sorted_rows(columns, sizes)
    anchors += low
    keys = keys_of(anchors, relations)
    del anchors, relations  # they are as large as the queries and starts of many graphs
    is_start = np.ones(len(keys) + 1, bool)
    np.not_equal(keys[1:], keys[:-1], out=is_start[1:-1])
    starts = np.flatnonzero(is_start)
    return SideIndex(keys[starts[:-1]], starts, answers)


class FilterIndex:
    """Known answers over one or more splits.

    Queries for side "tail" have heads as anchors and tails as answers; for side "head" tails are
    the anchors and heads the answers.  An anchor that no triple has is known for nothing.
    """

    def __init__(self, indices: Sequence[Mapping[str, SideIndex]]):
        self._indices: list[dict[str, SideIndex]] = [
            {side: SideIndex(*map(read_only, index[side])) for side in SIDES} for index in indices
        ]

    @classmethod
    def of(cls, *splits: np.ndarray) -> FilterIndex:
        """Return the index of some splits (T, 3)."""
        return cls([{side: build_side(side, rows) for side in SIDES} for rows in splits])

    def answers(self, side: str, anchors: np.ndarray, relations: np.ndarray) -> Answers:
        """Return where the known answers of queries (B,) lie; one of two splits is repeated."""
        sides = [index[side] for index in self._indices]
        ranges = [Ranges(own.answers, *own.find(anchors, relations)) for own in sides]
        return Answers(len(anchors), ranges)

    def contains(
        self, side: str, anchors: np.ndarray, relations: np.ndarray, candidates: np.ndarray
    ) -> np.ndarray:
        """Return which candidates of queries (B,) are known answers: (B, K) bool.

        Candidates are (C, K) entity ids, of which B / C queries one after another share a row, or
        (K,) that all queries share.
        """
        candidates = np.ascontiguousarray(np.atleast_2d(candidates), np.int64)
        rows = np.arange(len(anchors)) * len(candidates) // max(1, len(anchors))
        is_known = np.zeros((len(anchors), candidates.shape[1]), bool)
        for index in self._indices:
            answers, (starts, stops) = index[side].answers, index[side].find(anchors, relations)
            if len(anchors) > FEW:
                from kge_torchrec.data.store import search

                search.mark_members(answers, starts, stops, candidates, rows, is_known)
                continue
            for query, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                wanted = candidates[rows[query]].astype(answers.dtype)
                is_known[query] |= _places(answers[start:stop], wanted)[1]
        return is_known

    def joined(self, other: FilterIndex) -> FilterIndex:
        """Return an index that also has the answers of another one."""
        return FilterIndex([*self._indices, *other._indices])

    def relations_between(self, head: int, tail: int) -> np.ndarray:
        """Return the relations (M,) int64 from one entity to another; some are repeated."""
        relations = [np.empty(0, np.int64)]
        for index in (sides["tail"] for sides in self._indices):
            own = index.between(head, head + 1)
            start, stop = index.starts[own.start], index.starts[own.stop]
            rows = start + np.flatnonzero(index.answers[start:stop] == tail)
            query = np.searchsorted(index.starts, rows, "right") - 1
            relations.append(relations_of(index.queries[query]))
        return np.concatenate(relations)

    def side_index(self, side: str) -> SideIndex:
        """Return the index of a side; ValueError if it is over more than one split."""
        (index,) = self._indices
        return index[side]


def _bounds(
    values: np.ndarray, starts: np.ndarray, stops: np.ndarray, first: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return where the values from ``first`` to ``stop`` - 1 lie in ascending ranges."""
    if len(starts) > FEW:
        from kge_torchrec.data.store import search

        return search.bounds(values, starts, stops, first, stop)
    # Of the values' type, or numpy would convert the whole range; ``stop`` itself may not fit.
    low, last = np.array([first, stop - 1], values.dtype)
    ranges = [values[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    lows = np.array([np.searchsorted(own, low) for own in ranges], np.int64)
    highs = np.array([np.searchsorted(own, last, "right") for own in ranges], np.int64)
    return starts + lows, starts + highs


# Answers returned at once: a few arrays of this length fit a cache and bound the memory.
PIECE = 1 << 17


class Ranges(NamedTuple):
    """Ranges of some ids, one per query: query i has ``ids[starts[i]:stops[i]]``."""

    ids: np.ndarray  # entities, ascending within each range; may be memory-mapped
    starts: np.ndarray  # (Q,) int64
    stops: np.ndarray

    def gathered(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the query (M,), ascending, and the id (M,) of all places of the ranges, int64."""
        counts = self.stops - self.starts
        # Position within the query's range, plus where that range starts.
        position = np.repeat(self.starts - (np.cumsum(counts) - counts), counts)
        position += np.arange(len(position))
        return np.repeat(np.arange(len(counts)), counts), self.ids[position].astype(np.int64)


class Answers:
    """The answers of Q queries, as ranges of one or more arrays; one in two of them is repeated."""

    def __init__(self, queries: int, parts: Sequence[Ranges]):
        self.queries = queries
        self.parts = [part._replace(ids=read_only(part.ids)) for part in parts]

    @classmethod
    def single(cls, entity: np.ndarray) -> Answers:
        """Return answers with one entity (Q,) per query."""
        place = np.arange(len(entity))
        return cls(len(entity), [Ranges(entity, place, place + 1)])

    @classmethod
    def merged(cls, several: Sequence[Answers]) -> Answers:
        """Return the answers that each query has in any of several."""
        return cls(several[0].queries, [part for answers in several for part in answers.parts])

    @classmethod
    def joined(cls, several: Sequence[Answers]) -> Answers:
        """Return the answers of several groups of queries, numbered one after another."""
        total, parts, first = sum(answers.queries for answers in several), [], 0
        for answers in several:
            for part in answers.parts:
                ends = np.zeros((2, total), np.int64)  # the queries of other groups have none here
                ends[:, first : first + answers.queries] = part.starts, part.stops
                parts.append(Ranges(part.ids, *ends))
            first += answers.queries
        return cls(total, parts)

    def of(self, queries: np.ndarray) -> Answers:
        """Return the answers of some of the queries, by their places (B,)."""
        parts = [part._replace(starts=part.starts[queries], stops=part.stops[queries])
                 for part in self.parts]  # fmt: skip
        return Answers(len(queries), parts)

    @property
    def counts(self) -> np.ndarray:
        """Number of answers of each query, (Q,) int64."""
        return sum((part.stops - part.starts for part in self.parts), np.zeros(self.queries, int))

    def between(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the answers from ``first`` to ``stop`` - 1 as queries (M,) and entities (M,)."""
        return _concatenated(self.pieces(first, stop))

    def pieces(self, first: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield what ``between`` returns in pieces of at most ``PIECE`` answers."""
        for part in self.parts:
            starts, stops = _bounds(part.ids, part.starts, part.stops, first, stop)
            counts = stops - starts
            before = np.cumsum(counts) - counts
            for done in range(0, int(counts.sum()), PIECE):
                low, high = (np.clip(x - before, 0, counts) for x in (done, done + PIECE))
                yield Ranges(part.ids, starts + low, starts + high).gathered()

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all answers: query (M,) int64, ascending, and entity (M,) int64."""
        query, entity = _concatenated(part.gathered() for part in self.parts)
        if len(self.parts) > 1:
            order = np.argsort(query, kind="stable")
            query, entity = query[order], entity[order]
        return query, entity


def _concatenated(
    parts: Iterable[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of a query and an entity (M,) of several parts together."""
    several = list(parts) or [(np.empty(0, np.int64),) * 2]
    if len(several) == 1:
        return several[0]
    query, entity = map(np.concatenate, zip(*several, strict=True))
    return query, entity


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view like that of a mapped file, so that one compiled search serves both."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
