"""Answers of queries, read where they lie when asked for.

A query may have millions of answers, so nobody holds the answers of a batch: only where they start
and stop.  As the ids of a range ascend, those within a block of entities are a smaller range, found
by binary search.

Shapes: Q queries, M answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kge_torchrec.data import search

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
            starts, stops = search.narrow(part.ids, part.starts, part.stops, first, stop)
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
