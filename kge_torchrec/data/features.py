"""Features of entities: genres, tags or words whose vectors are summed into those of entities.

An item that nobody has touched has no trained row of its own, but its features have.  The vector of
an entity is its own row plus the weighted sum of the rows of its features (as in StarSpace, Wu et
al. 2018, where an entity is the bag of its features).  An entity without a training triple has
only the sum: its own row would be noise.

The rows of features lie behind those of the N entities in the same table, so they are sharded,
exchanged, stepped and saved like rows of entities.

Shapes: N entities, F features, M pairs of an entity and a feature, U entities of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import FEATURES
from kge_torchrec.data.readers.lists import read_features
from kge_torchrec.data.reading import Source
from kge_torchrec.data.sort import pointers
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError

if TYPE_CHECKING:  # torch is loaded where tensors are made: preparing a store does without
    import torch
    from torch import Tensor

_COLUMNS = ("entity", "feature", "weight")


@dataclass(frozen=True)
class Features:
    """The features of all entities of a store.

    Args:
        count: F.
        indptr: (N + 1,) int64, where the features of each entity start.
        ids: (M,) int64 ids of features from 0, ascending for each entity.
        weights: (M,) float32.
        own: (N,) bool, whose own row counts.
    """

    count: int
    indptr: Tensor
    ids: Tensor
    weights: Tensor
    own: Tensor

    @classmethod
    def of(cls, store: TripleStore) -> Features | None:
        """Return the features of a store, or None if it has none."""
        import torch

        table = store.features()
        if table is None:
            return None
        names, indptr, ids, weights = table
        own = (np.diff(indptr) == 0) | (store.degrees() > 0)
        arrays = (np.array(x) for x in (indptr, ids, weights, own))
        return cls(len(names), *map(torch.from_numpy, arrays))

    def to(self, device: torch.device) -> Features:
        """Return the same features on a device."""
        moved = {name: x.to(device) for name, x in vars(self).items() if name != "count"}
        return replace(self, **moved)

    @staticmethod
    def bytes_of(entities: int, pairs: int) -> int:
        """Return the bytes of the features of N entities with M pairs."""
        return 9 * entities + 12 * pairs

    def of_entities(self, entities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pairs of entities (U,), in any order and on the device of the features.

        Returns:
            The place of the entity of each pair among the entities (M,), the feature (M,) and the
            weight (M,).
        """
        import torch

        starts = self.indptr[entities]
        counts = self.indptr[entities + 1] - starts
        place = torch.repeat_interleave(counts)
        numbers = torch.arange(len(place), device=place.device)
        pairs = numbers + (starts - counts.cumsum(0) + counts)[place]
        return place, self.ids[pairs], self.weights[pairs]


class FeatureFile:
    """A file of features, see `readers.lists`.

    Args:
        path: The file.
        source: The triples, whose ids the file may have.

    Raises:
        DataError: The file is missing, has other columns, or a weight is not a positive number.
    """

    def __init__(self, path: str | Path, source: Source | None = None):
        self.path = Path(path)
        known = () if source is None else (source.kinds, source.labels, source.notes)
        self._table = read_features(self.path, *known)

    @property
    def entities(self) -> pa.Array:
        """The labels of the entities of the file, each once."""
        return pc.unique(self._table["entity"]).cast(pa.large_string())

    def check_entities(self, entities: pa.Array, used: np.ndarray, known: int) -> None:
        """Raise DataError if no entity of the file is in the graph.

        Args:
            entities: Labels (N,), those of the file among them.
            used: (N,) bool, which entities are in a triple.
            known: So many of the first entities are in a graph that is extended.
        """
        ids = pc.index_in(self.entities, value_set=entities).to_numpy()
        if not (used[ids] | (ids < known)).any():
            raise DataError(
                f"{self.path}: none of its {len(ids):,} entities is in the graph, such as "
                f"{self.entities[0].as_py()!r}; a line should be an entity's label, a tab and a "
                "feature"
            )

    def check_types(self, names: pa.Array) -> None:
        """Raise DataError for a node type with the name of the table of features."""
        if FEATURES in names.to_pylist():
            raise DataError(
                f"{self.path}: entities.tables.{FEATURES} has the settings of features, so no node "
                f"type can have the name {FEATURES!r}; rename the type"
            )

    def table(self, entities: pa.Array, known: FeatureTable | None = None) -> FeatureTable:
        """Return the features of the entities.

        A feature that an entity has twice counts once, with the sum of its weights.

        Args:
            entities: Labels (N,).
            known: Features of the first entities, whose names keep their ids.  Entities of the file
                have those of the file instead.
        """
        sums = self._table.group_by(["entity", "feature"]).aggregate([("weight", "sum")])
        labels, features = (sums[name].combine_chunks() for name in _COLUMNS[:2])
        place = pc.index_in(labels, value_set=entities)
        entity = place.to_numpy(zero_copy_only=False).astype(np.int64)
        names = pc.unique(features).cast(pa.large_string())
        names = names.take(pc.array_sort_indices(names))
        weights = sums["weight_sum"].to_numpy().astype(np.float32)
        kept: tuple[np.ndarray, ...] = ()
        if known is not None:
            new = pc.invert(pc.is_in(names, value_set=known.names))
            names = pa.concat_arrays([known.names, names.filter(new)])
            before = np.repeat(np.arange(len(known.indptr) - 1), np.diff(known.indptr))
            stays = ~np.isin(before, entity)
            kept = before[stays], known.ids[stays], known.weights[stays]
        feature = pc.index_in(features, value_set=names).to_numpy().astype(np.int64)
        columns = entity, feature, weights
        if kept:
            entity, feature, weights = map(np.concatenate, zip(kept, columns, strict=True))
        order = np.lexsort([feature, entity])
        indptr = pointers(entity, len(entities))
        return FeatureTable(names, indptr, feature[order], weights[order])


class FeatureTable(NamedTuple):
    """The features of entities as a store holds them."""

    names: pa.Array  # (F,)
    indptr: np.ndarray  # (N + 1,) as of `Features`
    ids: np.ndarray  # (M,)
    weights: np.ndarray  # (M,)

    @classmethod
    def of(cls, store: TripleStore | None) -> FeatureTable | None:
        """Return the features of a store, or None if it has none."""
        table = None if store is None else store.features()
        return None if table is None else cls(*table)

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
        indptr = np.append(0, np.cumsum(counts[inside]))
        names = self.names.take(pa.array(used))
        return (
            FeatureTable(names, indptr, ids.reshape(-1), self.weights[pairs]) if used.size else None
        )

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
