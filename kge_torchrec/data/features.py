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
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import WEIGHT
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.attributes import Attributes
from kge_torchrec.errors import DataError

if TYPE_CHECKING:  # torch is loaded where tensors are made: preparing a store does without
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Features:
    """The features of all entities of a store, as tensors (see `Attributes`)."""

    count: int  # F
    indptr: Tensor
    ids: Tensor
    weights: Tensor
    own: Tensor  # (N,) bool, whose own row counts

    @classmethod
    def of(cls, store: TripleStore) -> Features | None:
        """Return the features of a store, or None if it has none."""
        import torch

        table = store.features()
        if table is None:
            return None
        own = (np.diff(table.indptr) == 0) | (store.degrees() > 0)
        arrays = map(np.array, (*table[1:], own))
        return cls(len(table.names), *map(torch.from_numpy, arrays))

    def to(self, device: torch.device) -> Features:
        """Return the same features on a device."""
        moved = {name: x.to(device) for name, x in vars(self).items() if name != "count"}
        return replace(self, **moved)

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


def features_from(
    rows: pa.Table,
    file: Path,
    entities: pa.Array,
    in_graph: np.ndarray,
    known: Attributes | None = None,
) -> Attributes:
    """Return the features of entities (N,) from the rows of a file (`readers.lists.read_pairs`).

    DataError unless the file has an entity ``in_graph``, (N,) bool.  The names of ``known``
    features keep their ids; entities of the file lose those that they had.
    """
    places = pc.index_in(rows["entity"], value_set=entities).to_numpy()
    if not in_graph[places].any():
        own = pc.unique(rows["entity"])
        raise DataError(
            f"{file}: none of its {len(own):,} entities is in the graph, such as "
            f"{own[0].as_py()!r}; a line should be an entity's label, a tab and a feature"
        )
    if known is not None:
        known = known.kept(~np.isin(known.entities, places))
    features = rows["feature"].cast(pa.large_string()).combine_chunks()
    has_weights = WEIGHT in rows.column_names
    weights = rows[WEIGHT].to_numpy() if has_weights else np.ones(len(rows), np.float32)
    return Attributes.of_pairs(places, features, len(entities), weights, known)
