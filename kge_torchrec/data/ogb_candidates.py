"""Fixed candidates of the Open Graph Benchmark, as ids of a store.

OGB gives each validation and test triple 500 heads and 500 tails to compare the true ones with
(``head_neg`` and ``tail_neg``). ogbl-biokg takes them from the entities of the same type.

Shapes: T triples, m candidates per triple, M numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import COLUMNS, SIDES

Labels = Callable[[str, str | None], pa.Array | None]


class OGBCandidates:
    """The candidates of the splits of a data set, in the numbers of OGB.

    Args:
        parts: The parts of OGB's splits, by split.
        labels: Returns the labels of the numbers of a role ("head", "relation", "tail") and a type
            of entities, which is None if entities have no types.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Any]], labels: Labels):
        self._parts = {
            split: part for split, part in parts.items() if {"head_neg", "tail_neg"} <= part.keys()
        }
        self._labels = labels

    def of(
        self, entities: pa.Array, relations: pa.Array, triples: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield split, side and the candidates (T, m) int32 of the triples of a store.

        A candidate without a triple has no row in the table, and gets the id -1.

        Args:
            entities: The labels of the store's entities.
            relations: The labels of its relations.
            triples: Its triples (T, 3) by split.
        """
        for split, part in self._parts.items():
            vocabularies = {"head": entities, "relation": relations, "tail": entities}
            columns = [
                self._ids(part, role, np.asarray(part[role]), vocabularies[role])
                for role in COLUMNS
            ]
            lists = (column.tolist() for column in columns)
            row = {triple: i for i, triple in enumerate(zip(*lists, strict=True))}
            rows = [row[tuple(triple)] for triple in triples[split].tolist()]
            for side in SIDES:
                numbers = np.asarray(part[f"{side}_neg"])
                yield split, side, self._ids(part, side, numbers, entities)[rows]

    def _ids(
        self, part: Mapping[str, Any], role: str, numbers: np.ndarray, vocabulary: pa.Array
    ) -> np.ndarray:
        """Return the ids of numbers (T, ...), int32; -1 for those without a triple."""
        kinds = part.get(f"{role}_type")
        if kinds is None:
            return self._table(role, None, numbers, vocabulary)[numbers]
        ids, kinds = np.empty(numbers.shape, np.int32), np.asarray(kinds)
        for kind in np.unique(kinds):
            rows = kinds == kind
            ids[rows] = self._table(role, str(kind), numbers[rows], vocabulary)[numbers[rows]]
        return ids

    def _table(
        self, role: str, kind: str | None, numbers: np.ndarray, vocabulary: pa.Array
    ) -> np.ndarray:
        """Return the id of each number from 0 to the largest, (M,) int32."""
        labels = self._labels(role, kind)
        if labels is None:
            labels = numbered(np.arange(numbers.max(initial=-1) + 1), kind)
        ids = pc.index_in(labels, value_set=vocabulary).fill_null(-1)
        return ids.to_numpy(zero_copy_only=False).astype(np.int32)


def numbered(numbers: np.ndarray, kind: str | None) -> pa.Array:
    """Return the labels of numbers (M,) that have no labels of their own: "3", or "drug:3"."""
    prefix = "" if kind is None else f"{kind}:"
    return pa.array([f"{prefix}{number}" for number in numbers.tolist()], pa.large_string())
