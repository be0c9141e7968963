"""The nearest entities to an entity, by the metric that fits the scorer.

For a scorer that measures a distance, the metric is that distance. For other scorers it is the
cosine: the norm of a row reflects how often an entity is an answer, not what it means. Rows are
compared as the formula uses them, normalized if it normalizes them, and without biases.

Shapes: N entities, B queries, D elements per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import at_least
from kge_torchrec.data.store.filter_index import Answers
from kge_torchrec.kernels.comparisons import distance
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.ranking.search import Queries, top_k
from kge_torchrec.trained_model import TrainedModel

MEANINGS = {
    "cosine": "cosine of the angle between the rows",
    "euclidean": "minus the Euclidean distance of the rows",
    "manhattan": "minus the Manhattan distance of the rows",
    "moduli": "minus the sum of the moduli of the differences of complex numbers",
}


@dataclass(frozen=True)
class Neighbour:
    """An entity near another entity."""

    rank: int  # from 1
    label: str
    score: float  # larger is nearer


class EntitySimilarity(nn.Module):
    """A similarity of entities with the interface of a scorer, so ``top_k`` can search with it."""

    def __init__(self, scorer: Scorer):
        super().__init__()
        self.scorer, self.metric = scorer, metric_of(scorer)

    def points(self, rows: Tensor) -> Tensor:
        """Return entity rows in the form that is compared, without biases."""
        rows = self.scorer.vectors(rows.float())
        return nn.functional.normalize(rows, dim=-1) if self.metric == "cosine" else rows

    def encode(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        """Return the points of anchors, whatever the relation and the side."""
        return self.points(anchor)

    def matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        """Compare points with rows, as ``Scorer.matrix``: (1, b, D), (1, K, E) -> (1, b, K)."""
        points = self.points(rows)
        if self.metric == "cosine":
            return torch.matmul(query, points.transpose(-1, -2))
        return -distance(self.metric, query, points)  # type: ignore[arg-type]


def metric_of(scorer: Scorer) -> str:
    """Return the key of ``MEANINGS`` that fits a scorer."""
    if not scorer.is_distance:
        return "cosine"
    kind = getattr(scorer.comparison, "kind", "euclidean").removeprefix("scaled_")
    return kind if kind in MEANINGS else "euclidean"


def nearest_entities(model: TrainedModel, entities: Tensor, k: int = 10) -> list[list[Neighbour]]:
    """Return the k nearest entities to each of the ids (B,), nearest first. Collective.

    An entity is not its own neighbor.
    """
    at_least("k", k, 1)
    similarity = EntitySimilarity(model.scorer)
    themselves = Answers.single(entities.numpy())
    k, queries = min(k, model.num_entities), Queries(entities, torch.zeros_like(entities), "tail")
    scores, ids = top_k(similarity, model.shard, queries, k, themselves)  # type: ignore[arg-type]
    neighbours = []
    for its_scores, its_ids in zip(scores.cpu(), ids.cpu(), strict=True):
        exists = its_ids >= 0
        pairs = zip(
            model.entity_labels.labels(its_ids[exists].numpy()),
            its_scores[exists].tolist(),
            strict=True,
        )
        neighbours.append([Neighbour(rank, *pair) for rank, pair in enumerate(pairs, 1)])
    return neighbours
