"""The table of features of a store.

Shapes: N entities, F features, M pairs of an entity and a feature.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa


class FeatureTable(NamedTuple):
    """The features of entities; its arrays may be mapped.

    Args:
        names: (F,) labels of the features.
        indptr: (N + 1,) int64, where the features of each entity start.
        ids: (M,) int64 ids of features from 0, ascending for each entity.
        weights: (M,) float32.
    """

    names: pa.Array
    indptr: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    def longer(self, num_entities: int) -> FeatureTable:
        """Return the table with further entities, which have no features."""
        more = 0, num_entities + 1 - len(self.indptr)
        return self._replace(indptr=np.pad(self.indptr, more, "edge"))

    def inside(self, inside: np.ndarray) -> FeatureTable | None:
        """Return the features of the entities inside, (N,) bool; None if they have none.

        Features of no entity inside are left out.
        """
        counts = np.diff(self.indptr)
        pairs = np.repeat(inside, counts)
        used, ids = np.unique(self.ids[pairs], return_inverse=True)
        if not used.size:
            return None
        indptr, names = np.append(0, np.cumsum(counts[inside])), self.names.take(pa.array(used))
        return FeatureTable(names, indptr, ids.reshape(-1), self.weights[pairs])

    def counts(self, entities: pa.Array, used: np.ndarray) -> dict[str, Any]:
        """Return the entry of the features in the report of a store, without their source.

        It says how many entities have features and no triple in any split, and names one.

        Args:
            entities: Labels (N,).
            used: (N,) bool, which entities are in a triple.
        """
        has_features = np.diff(self.indptr) > 0
        lone = has_features & ~used
        return {
            "features": len(self.names),
            "pairs": len(self.ids),
            "entities": int(has_features.sum()),
            "without_triples": int(lone.sum()),
            "example": entities[int(lone.argmax())].as_py() if lone.any() else None,
        }
