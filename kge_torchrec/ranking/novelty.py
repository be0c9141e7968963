"""A penalty of popular answers, which moves rare and new ones up.

Shapes: B queries, n rows of a block, M pairs of a relation and an entity.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import OTHER
from kge_torchrec.data.sort import pointers
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import anchors_of, relations_of
from kge_torchrec.models.scorers.base import SIDES, Side


class Novelty:
    """Subtracts ``weight * log(1 + n)`` from the score of an answer.

    n is the number of training triples of the relation with the answer on that side, so an entity
    that is in none keeps its score.

    Args:
        store: The data.
        rows: (first, stop), the entities of this rank.
        weight: The weight; below 0 it moves popular answers up.
    """

    def __init__(self, store: TripleStore, rows: tuple[int, int], weight: float):
        self.weight, self._train = weight, store.filter_index(("train",))
        self._pairs = {}
        for side in SIDES:
            index = store.side_index("train", OTHER[side])
            own = index.between(*rows)
            queries, counts = index.queries[own], np.diff(index.starts[own.start : own.stop + 1])
            relations = relations_of(queries)
            order = np.argsort(relations, kind="stable")
            indptr = pointers(relations, store.num_relations)
            self._pairs[side] = indptr, anchors_of(queries)[order], self._penalty(counts[order])

    def _penalty(self, counts: np.ndarray) -> np.ndarray:
        return (self.weight * np.log1p(counts)).astype(np.float32)

    def of(self, side: Side, relations: Tensor, entities: Tensor) -> Tensor:
        """Return the penalties (B,) float32 of answers (B,) to queries of relations (B,)."""
        found = self._train.answers(OTHER[side], entities.numpy(), relations.numpy())
        return torch.from_numpy(self._penalty(found.counts))

    def subtract(self, scores: Tensor, first: int, relations: Tensor, side: Side) -> None:
        """Subtract the penalties from a block (B, n) of the entities from ``first`` on, in place.

        Args:
            scores: The scores.
            first: The id of the first entity.
            relations: (B,), the relations of the queries.
            side: Their side.
        """
        indptr, entities, penalties = self._pairs[side]
        distinct, sizes = relations.unique_consecutive(return_counts=True)
        for relation, rows in zip(distinct.tolist(), scores.split(sizes.tolist()), strict=True):
            own = slice(indptr[relation], indptr[relation + 1])
            low, high = own.start + np.searchsorted(entities[own], (first, first + scores.shape[1]))
            penalty = np.zeros(scores.shape[1], np.float32)
            penalty[entities[low:high] - first] = penalties[low:high]
            rows -= torch.from_numpy(penalty).to(rows.device)
