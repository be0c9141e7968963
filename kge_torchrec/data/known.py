"""The filter index: which answers of a query (anchor, relation, ?) are known to be true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kge_torchrec.data import search
from kge_torchrec.data.answers import Answers, Ranges, read_only
from kge_torchrec.data.ordering import id_counts, sorted_rows

if TYPE_CHECKING:
    from kge_torchrec.data.query_list import QueryList

SIDES = ("tail", "head")


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


class KnownTriples:
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
        self._indices = [
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
            search.mark_members(index[side].entities, starts, stops, candidates, found)
        return found

    def queries(self, side: str) -> QueryList:
        """The distinct queries for a side.  Raises ValueError unless they are of one split."""
        # Imported on use: numba takes a second that others need not wait.
        from kge_torchrec.data.query_list import QueryList

        (index,) = self._indices
        return QueryList(index[side].indptr, index[side].relations)

    def _checked(self, side, anchors, relations) -> tuple[np.ndarray, np.ndarray]:
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


def _ranges(index: SideIndex, anchors, relations) -> tuple[np.ndarray, np.ndarray]:
    return search.find_ranges(index.indptr, index.relations, anchors, relations)
