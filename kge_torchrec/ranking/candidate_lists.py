"""Lists of candidates per query: fixed ones, as in the Open Graph Benchmark, and random samples.

A true answer is compared with the entities of its list only. Such ranks are better than ranks
among all entities, mostly much better, so every report names the kind of list (``kind``).

Shapes: T triples, B queries, m candidates per query, N entities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import numpy as np

from kge_torchrec.data.store.filter_index import FilterIndex
from kge_torchrec.errors import DataError
from kge_torchrec.models.scorers.base import SIDES, Side

MISSING = -1  # fills up the rows of lists that are shorter than others


class Listed(NamedTuple):
    """The candidates of some queries, besides their true answers.

    Attributes:
        ids: (B, m) int64 entity ids; ``MISSING`` where a query has fewer.
        pools: (B,) int64, the number of entities that each list was drawn from.
    """

    ids: np.ndarray
    pools: np.ndarray


class CandidateLists(Protocol):
    """The candidates of each query."""

    kind: Literal["fixed", "sampled"]
    label: str  # a description of the lists, for reports

    def of(self, side: Side, triples: np.ndarray) -> Listed:
        """Return the candidates for one side of triples (B, 3) int64."""


class FixedLists:
    """Lists that belong to the triples, unfiltered; a candidate may be repeated.

    Args:
        triples: (T, 3), the triples with lists.
        lists: Per side (T, m) entity ids; ``MISSING`` where a triple has fewer.
        source: Where the lists come from, for messages and ``label``.

    Raises:
        DataError: A triple is repeated.
    """

    kind: Literal["fixed", "sampled"] = "fixed"

    def __init__(self, triples: np.ndarray, lists: Mapping[Side, np.ndarray], source: str):
        self._row = {tuple(triple): row for row, triple in enumerate(triples.tolist())}
        if len(self._row) < len(triples):
            raise DataError(f"{source} gives candidates twice for the same triple; leave one out")
        self._lists, self._source = lists, source
        sizes = " and ".join(f"{lists[side].shape[1]:,} {side}" for side in SIDES)
        self.label = f"{sizes} candidates per triple, given by {source}"

    def of(self, side: Side, triples: np.ndarray) -> Listed:
        """Return the candidates for one side of triples (B, 3) int64.

        Raises:
            DataError: A triple has no list.
        """
        ids = np.asarray(self._lists[side][self.rows_of(triples)], np.int64)
        return Listed(ids, (ids != MISSING).sum(1))

    def rows_of(self, triples: np.ndarray) -> list[int]:
        """Return the rows of the lists that belong to triples (B, 3).

        Raises:
            DataError: A triple has no list.
        """
        rows = [self._row.get(tuple(triple), MISSING) for triple in triples.tolist()]
        if MISSING in rows:
            missing = tuple(triples[rows.index(MISSING)].tolist())
            raise DataError(
                f"{self._source} gives no candidates for the triple with the ids {missing}; "
                "evaluation.candidates fixed ranks only triples that have a list"
            )
        return rows


class SampledLists:
    """Uniform samples, without replacement, of the entities that are no known answers.

    The sample of a query depends on the seed and the triple only. A query with fewer such entities
    than ``count`` gets them all.

    Args:
        known: Triples whose answers are never candidates; None filters only the true answer.
        num_entities: N.
        count: The number of candidates per query.
        seed: Seed of the samples.
    """

    kind: Literal["fixed", "sampled"] = "sampled"

    def __init__(self, known: FilterIndex | None, num_entities: int, count: int, seed: int):
        self._known, self._entities, self._count, self._seed = known, num_entities, count, seed
        self.label = f"{count:,} random candidates per query (uniform, seed {seed})"

    def of(self, side: Side, triples: np.ndarray) -> Listed:
        """Return the candidates for one side of triples (B, 3) int64."""
        answer_at, anchor_at = (2, 0) if side == "tail" else (0, 2)
        ids = np.full((len(triples), self._count), MISSING, np.int64)
        pools = np.empty(len(triples), np.int64)
        query, entity = np.arange(len(triples)), triples[:, answer_at]
        if self._known is not None:
            answers = self._known.answers(side, triples[:, anchor_at], triples[:, 1])
            parts = [(query, entity), *answers.pieces(0, self._entities)]
            query, entity = (np.concatenate(column) for column in zip(*parts, strict=True))
        for row, triple in enumerate(triples.tolist()):
            stream = np.random.default_rng([self._seed, SIDES.index(side), *triple])
            answers_of_row = np.unique(entity[query == row])
            pools[row] = self._entities - len(answers_of_row)
            size = min(self._count, pools[row])
            places = stream.choice(pools[row], size, replace=False, shuffle=False)
            # The entity at a place among those left: skip the answers that come before it.
            before = answers_of_row - np.arange(len(answers_of_row))
            ids[row, :size] = places + np.searchsorted(before, places, "right")
        return Listed(ids, pools)
