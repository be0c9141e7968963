"""Types or features of entities: labels, of which an entity may have several, or none.

Shapes: N entities, K labels, M pairs of an entity and a label.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data.sort import pointers
from kge_torchrec.data.store.filter_index import Ranges, anchors_of, keys_of, relations_of


class Attributes(NamedTuple):
    """The types or the features of all entities; its arrays may be mapped."""

    names: pa.Array  # (K,) the labels
    indptr: np.ndarray  # (N + 1,) int64, where the labels of each entity start in ``ids``
    ids: np.ndarray  # (M,) int64 places in ``names``, ascending for each entity, each once
    weights: np.ndarray | None = None  # (M,) float32, of features only

    @classmethod
    def of_pairs(
        cls,
        entities: np.ndarray,
        labels: pa.Array,
        num_entities: int,
        weights: np.ndarray | None = None,
        before: Attributes | None = None,
    ) -> Attributes:
        """Return the table of pairs of an entity (M,) and a label (M,), in any order.

        A pair that is repeated counts once, with the sum of its weights.  The pairs of ``before``
        are added; its labels keep their ids.
        """
        names = pc.unique(labels)
        names = names.take(pc.array_sort_indices(names))
        if before is not None:
            is_new = pc.invert(pc.is_in(names, value_set=before.names))
            names = pa.concat_arrays([before.names, names.filter(is_new)])
        ids = pc.index_in(labels, value_set=names).to_numpy().astype(np.int64)
        if before is not None:
            entities = np.concatenate([before.entities, entities])
            ids = np.concatenate([before.ids, ids])
            if weights is not None and before.weights is not None:
                weights = np.concatenate([before.weights, weights])
        keys = keys_of(entities, ids)
        if weights is None:
            keys = np.unique(keys)
        else:
            keys, place = np.unique(keys, return_inverse=True)
            weights = np.bincount(place, weights, len(keys)).astype(np.float32)
        return cls(names, pointers(anchors_of(keys), num_entities), relations_of(keys), weights)

    @property
    def entities(self) -> np.ndarray:
        """(M,) int64, the entity of each pair."""
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    def of(self, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels of entities (B,): places among the B (M,), ascending, and ids (M,)."""
        return Ranges(self.ids, self.indptr[entities], self.indptr[entities + 1]).gathered()

    def longer(self, num_entities: int) -> Attributes:
        """Return the table with further entities, which have no labels."""
        more = 0, num_entities + 1 - len(self.indptr)
        return self._replace(indptr=np.pad(self.indptr, more, "edge"))

    def kept(self, pairs: np.ndarray) -> Attributes:
        """Return the table with some of its pairs, (M,) bool."""
        weights = None if self.weights is None else self.weights[pairs]
        indptr = pointers(self.entities[pairs], len(self.indptr) - 1)
        return Attributes(self.names, indptr, self.ids[pairs], weights)

    def inside(self, inside: np.ndarray) -> Attributes:
        """Return the table of the entities inside, (N,) bool, with the same labels."""
        indptr = np.append(0, np.cumsum(np.diff(self.indptr)[inside]))
        return self.kept(inside[self.entities])._replace(indptr=indptr)

    def without_unused(self) -> Attributes:
        """Return the table without the labels of no entity."""
        used, ids = np.unique(self.ids, return_inverse=True)
        return self._replace(names=self.names.take(pa.array(used)), ids=ids.reshape(-1))
