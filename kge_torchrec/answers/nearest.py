"""The nearest entities to an entity, by the metric that fits the scorer, and a FAISS index of all.

For a scorer that measures a distance, the metric is that distance. For other scorers it is the
cosine: the norm of a row reflects how often an entity is an answer, not what it means. Rows are
compared as the formula uses them, normalized if it normalizes them, and without biases.

The index is for programs that search for neighbors many times. FAISS has Manhattan distance besides
inner product and Euclidean distance, exact and approximate indexes, and compressed indexes for
tables that do not fit into memory. usearch and hnswlib have neither Manhattan distance nor product
quantization.

Shapes: N entities, B queries, D elements per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec import files
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import at_least
from kge_torchrec.data.store.filter_index import Answers
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.errors import KGEError
from kge_torchrec.kernels.comparisons import distance
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.ranking.topk import Queries, top_k
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
        """Return entity rows in the form that is compared: (..., D) -> (..., D without biases)."""
        rows = self.scorer.entity(rows.float())
        rows = rows[..., : rows.shape[-1] - self.scorer.bias_columns]
        return nn.functional.normalize(rows, dim=-1) if self.metric == "cosine" else rows

    def prepared(self, anchor: Tensor, relation: Tensor, side: Side) -> Callable[[Tensor], Tensor]:
        """Return a function that scores rows, like ``Scorer.prepared``.

        It ignores the relation and the side.
        """
        queries = self.points(anchor)[None]  # (1, b, D)

        def similarity(rows: Tensor) -> Tensor:
            points = self.points(rows)[None]
            if self.metric == "cosine":
                return torch.matmul(queries, points.transpose(-1, -2))[0]
            return -distance(self.metric, queries, points)[0]  # type: ignore[arg-type]

        return similarity


def metric_of(scorer: Scorer) -> str:
    """Return the key of ``MEANINGS`` that fits a scorer."""
    return scorer.entity_metric or ("euclidean" if scorer.is_distance else "cosine")


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


ROWS = 1 << 15  # rows per collective
TRAINING = 1 << 17  # the most rows to train an index on, for kinds that need training
_METRICS = {
    "cosine": ("METRIC_INNER_PRODUCT", "inner product of rows of length 1: the cosine"),
    "euclidean": ("METRIC_L2", "squared Euclidean distance"),
    "manhattan": ("METRIC_L1", "Manhattan distance"),
    "moduli": ("METRIC_L2", "squared Euclidean distance, near to that of the scorer, which FAISS "
               "does not have: the sum of complex moduli"),
}  # fmt: skip


def write_index(model: TrainedModel, path: str | Path, kind: str = "HNSW32") -> dict[str, Any]:
    """Write an index of all entities; see ``Answering.write_index``. Collective.

    Rank 0 holds the whole index and receives ``ROWS`` rows at a time.
    """
    path, similarity = Path(path), EntitySimilarity(model.scorer).eval()
    dim = model.shard.dim - model.scorer.bias_columns
    builder = IndexBuilder(dim, kind, _METRICS[similarity.metric][0])
    on_first_rank(model.processes, builder.start)
    if on_first_rank(model.processes, lambda: not builder.index.is_trained):
        step = -(-model.num_entities // TRAINING)
        rows = [part[::step] for part in _points(model, similarity)]
        on_first_rank(model.processes, lambda: builder.train(np.concatenate(rows)))
    for part in _points(model, similarity):
        on_first_rank(model.processes, lambda part=part: builder.index.add(part))  # type: ignore[misc]
    about = {"entities": model.num_entities, "dim": dim, "metric": _METRICS[similarity.metric][1],
             "kind": kind, "labels": f"{path.name}.labels.arrow"}  # fmt: skip
    on_first_rank(model.processes, lambda: _write(model, builder, path, about))
    return about


def _points(model: TrainedModel, similarity: EntitySimilarity) -> Iterator[np.ndarray]:
    """Yield all entities in the form that the metric compares, (ROWS, D) float32. Collective."""
    with torch.no_grad():
        for ids in torch.arange(model.num_entities).split(ROWS):
            rows = model.shard.fetch(ids.to(model.shard.device))
            yield np.ascontiguousarray(similarity.points(rows).cpu().numpy())


class IndexBuilder:
    """A FAISS index under construction, on rank 0 only.

    Args:
        dim: D.
        kind: A ``faiss.index_factory`` string.
        metric: The name of FAISS for its metric, such as "METRIC_L2".
    """

    index: Any

    def __init__(self, dim: int, kind: str, metric: str):
        self._arguments, self._metric = (dim, kind), metric

    def start(self) -> None:
        try:
            import faiss
        except ImportError:
            raise KGEError("an index needs FAISS: pip install 'kge-torchrec[index]'") from None
        try:
            self.index = faiss.index_factory(*self._arguments, getattr(faiss, self._metric))
        except RuntimeError as error:
            raise self._refused(error) from error

    def build(self, points: np.ndarray) -> None:
        """Make the index of all points (N, D)."""
        self.start()
        if not self.index.is_trained:
            self.train(points)
        self.index.add(points)

    def save(self, path: Path) -> None:
        import faiss

        try:
            faiss.write_index(self.index, str(path))
        except RuntimeError as error:  # such as a full disk
            raise OSError(f"{path} cannot be written: {error}") from error

    def train(self, points: np.ndarray) -> None:
        try:
            self.index.train(points)
        except RuntimeError as error:
            raise self._refused(error) from error

    def _refused(self, error: RuntimeError) -> ConfigError:
        dim, kind = self._arguments
        reason = str(error).strip().splitlines()[-1]
        return ConfigError(
            f"FAISS cannot make an index {kind!r} for this dim ({dim}), metric and graph "
            f"({reason}); Flat and HNSW32 always work"
        )


def _write(model: TrainedModel, builder: IndexBuilder, path: Path, about: dict[str, Any]) -> None:
    with files.replacing(path) as partial:
        builder.save(partial)
        model.entity_labels.save(path.with_name(about["labels"]))
        files.write_json(path.with_name(f"{path.name}.json"), about)
