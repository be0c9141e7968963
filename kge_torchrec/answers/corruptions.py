"""True triples of a split beside false ones: what probabilities and thresholds are fitted to.

A corruption has another head or tail, drawn uniformly from all entities, or as often as the
relation has them on that side in train ("seen": harder, since most of all entities are of the
wrong type; Socher et al. 2013 draw from those seen too).  What the data holds is no corruption.

Shapes: T triples, M true and false ones, n corruptions of a triple and side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from kge_torchrec.config import ConfigError
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError
from kge_torchrec.models.scorers.base import SIDES, Side

Among = Literal["seen", "all"]
AMONG = ("seen", "all")
POOL = 256  # triples of a relation that its corruptions are drawn from, a sample of all
TRIES = 20  # draws of a corruption, in case that it is known
_CHUNK = 1 << 20


class Labelled(NamedTuple):
    """M triples, true and false ones, of queries for one side."""

    side: Side
    triples: np.ndarray  # (M, 3) int64
    labels: np.ndarray  # (M,) bool


def labelled(
    store: TripleStore, split: str, count: int, among: Among, seed: int, limit: int
) -> list[Labelled]:
    """For each side the triples of a split, and ``count`` corruptions of each.

    The same on every rank.  limit: a sample of so many triples if the split has more.
    Raises DataError for a split without triples, ConfigError for an unknown ``among``, a
    limit below 1 and a negative seed.
    """
    if among not in AMONG:
        raise ConfigError(f"among must be one of {', '.join(AMONG)}, got {among!r}")
    if limit < 1:
        raise ConfigError(f"limit must be an integer >= 1, got {limit}")
    if seed < 0:
        raise ConfigError(f"seed must be an integer >= 0, got {seed}")
    random = np.random.default_rng(seed)
    triples = np.asarray(store.split(split), np.int64)
    if not len(triples):
        raise DataError(f"{store.path} has no {split} triples")
    if len(triples) > limit:
        triples = triples[np.sort(random.choice(len(triples), limit, replace=False))]
    pools = Pools(store, np.unique(triples[:, 1]), random) if among == "seen" else None
    found = []
    for side in SIDES:
        false = corrupt(store, triples, side, count, pools, random)
        labels = np.arange(len(triples) + len(false)) < len(triples)
        found.append(Labelled(side, np.concatenate([triples, false]), labels))
    return found


class Pools:
    """A sample of the training triples of some relations: at most ``POOL`` of each.

    Read a chunk at a time, twice.
    """

    def __init__(self, store: TripleStore, relations: np.ndarray, random: np.random.Generator):
        counts = np.zeros(store.num_relations, np.int64)
        for chunk in _chunks(store.train):
            counts += np.bincount(chunk[:, 1], minlength=store.num_relations)
        # A triple is the n-th of relation r; what r * width + n is wanted, ascending.
        width = int(counts.max(initial=0)) + 1
        wanted = np.concatenate(
            [np.empty(0, np.int64)]
            + [
                relation * width + np.sort(random.choice(count, min(count, POOL), replace=False))
                for relation, count in zip(relations, counts[relations], strict=True)
            ]
        )
        found = [np.empty((0, 3), np.int64)]
        seen = np.zeros_like(counts)
        for chunk in _chunks(store.train):
            chunk = chunk[np.argsort(chunk[:, 1], kind="stable")]
            relation = chunk[:, 1]
            number = np.arange(len(chunk)) - np.searchsorted(relation, relation) + seen[relation]
            seen += np.bincount(relation, minlength=len(seen))
            found.append(chunk[np.isin(relation * width + number, wanted)])
        triples = np.concatenate(found)
        self._triples = triples[np.argsort(triples[:, 1], kind="stable")]
        self._starts = np.searchsorted(self._triples[:, 1], np.arange(store.num_relations + 1))

    def draw(
        self, side: Side, relations: np.ndarray, random: np.random.Generator, entities: int
    ) -> np.ndarray:
        """An entity (M,) on that side of each of the relations (M,); any where none was seen."""
        starts, stops = self._starts[relations], self._starts[relations + 1]
        any_of_all = random.integers(entities, size=len(relations))
        if not len(self._triples):
            return any_of_all
        place = starts + (random.random(len(relations)) * (stops - starts)).astype(np.int64)
        column = self._triples[:, 0 if side == "head" else 2]
        drawn = column[np.minimum(place, len(column) - 1)]
        return np.where(stops > starts, drawn, any_of_all)


def corrupt(
    store: TripleStore,
    triples: np.ndarray,
    side: Side,
    count: int,
    pools: Pools | None,
    random: np.random.Generator,
) -> np.ndarray:
    """``count`` corruptions on one side of each of the triples (T, 3): (M, 3) int64.

    Fewer where ``TRIES`` draws gave nothing but what the data holds.
    """
    index, column = store.filter_index(), 0 if side == "head" else 2
    false = np.repeat(triples, count, axis=0)
    anchors, relations = false[:, 2 - column], false[:, 1]
    left = np.arange(len(false))  # still true
    for _ in range(TRIES):
        if pools is None:
            drawn = random.integers(store.num_entities, size=len(left))
        else:
            drawn = pools.draw(side, relations[left], random, store.num_entities)
        false[left, column] = drawn
        known = index.contains(side, anchors[left], relations[left], drawn[:, None])[:, 0]
        left = left[known]
        if not len(left):
            break
    return np.delete(false, left, axis=0)


def _chunks(triples: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(triples), _CHUNK):
        yield np.asarray(triples[start : start + _CHUNK], np.int64)
