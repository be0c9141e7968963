"""The vectors of a rank's entities: sums of their own rows and of the rows of their features.

The rows of features lie behind those of all entities, so most of them are on other ranks.  One
exchange gives every rank the rows of all features, and another one sums their gradients.

Shapes: N entities, F features, n entities and r rows on this rank, M pairs of an entity of this
rank and a feature, D elements per row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.data.features import Features
from kge_torchrec.embeddings.backend import EntityShard


class FeatureBags:
    """The features of the entities on this rank.

    Args:
        features: Those of all entities.
        shard: This rank's rows of entities and features.
    """

    def __init__(self, features: Features, shard: EntityShard):
        self.num_entities = len(features.own)
        self.first, stop = (min(place, self.num_entities) for place in shard.row_range)
        starts = features.indptr[self.first : stop + 1]
        pairs = slice(starts[0], starts[-1])
        device = shard.rows.device
        self.own = features.own[self.first : stop, None].to(device)
        self.offsets = (starts[:-1] - starts[0]).to(device)
        self.ids, self.weights = (x[pairs].to(device) for x in (features.ids, features.weights))

    def sums(self, rows: Tensor, of_features: Tensor) -> Tensor:
        """Return the vectors (n, D) from rows of entities (n, D) and of all features (F, D)."""
        vectors = rows * self.own
        if len(rows):
            vectors += torch.nn.functional.embedding_bag(
                self.ids,
                of_features,
                self.offsets,
                mode="sum",
                per_sample_weights=self.weights.to(of_features),
            )
        return vectors


class EntityVectors:
    """The vectors of this rank's entities, and the way back for their gradients.  Collective.

    Args:
        bags: The features of the entities.
        shard: This rank's rows of entities and features.

    Attributes:
        shard: The vectors, like the rows of a table of N entities.
    """

    def __init__(self, bags: FeatureBags, shard: EntityShard):
        count = bags.num_entities
        places = torch.arange(count, shard.num_entities, device=shard.rows.device)
        self._own = bags.own
        self._of_features = shard.fetch(places).requires_grad_()
        self._features = [max(0, place - count) for place in shard.row_range]  # on this rank
        with torch.enable_grad():
            rows = shard.rows[: len(bags.own)].detach().float()
            self._vectors = bags.sums(rows, self._of_features)
        self.shard = replace(
            shard, rows=self._vectors.detach(), first_row=bags.first, num_entities=count
        )

    def row_gradients(self, grad: Tensor) -> list[Tensor]:
        """Return the gradients of this rank's rows of entities, and of features.  Collective.

        Args:
            grad: (n, D), the gradients of the vectors.
        """
        of_features = torch.zeros_like(self._of_features)
        if len(grad):
            (of_features,) = torch.autograd.grad(self._vectors, self._of_features, grad)
        if self.shard.ranks > 1:
            dist.all_reduce(of_features)
        return [grad * self._own, of_features[slice(*self._features)]]


def entity_vectors(shard: EntityShard, features: Features | None) -> EntityShard:
    """Return the vectors of this rank's entities from a shard that holds features as well.

    Collective if there are features.
    """
    if features is None:
        return shard
    return EntityVectors(FeatureBags(features, shard), shard).shard
