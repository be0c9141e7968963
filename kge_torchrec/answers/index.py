"""A FAISS index of all entities, for programs that search for neighbors many times.

FAISS has Manhattan distance besides inner product and Euclidean distance, exact and approximate
indexes, and compressed indexes for tables that do not fit into memory. usearch and hnswlib have
neither Manhattan distance nor product quantization.

Shapes: N entities, D elements per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kge_torchrec import files
from kge_torchrec.answers.nearest import EntitySimilarity
from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.errors import KGEError
from kge_torchrec.trained_model import TrainedModel

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
    """Write an index of all entities in order of id. Collective.

    ``faiss.read_index`` reads the file. The function also writes FILE.json, the description, and
    FILE.labels.arrow, the labels in order of id. Rank 0 holds the whole index and receives
    ``ROWS`` rows at a time.

    Args:
        model: The model.
        path: The file of the index.
        kind: A ``faiss.index_factory`` string.

    Returns:
        The content of FILE.json: "entities", "dim", "metric", "kind" and "labels".

    Raises:
        KGEError: faiss is not installed.
        ConfigError: FAISS has no index of this kind for the metric and the dim.
        OSError: The index cannot be written.
    """
    path, similarity = Path(path), EntitySimilarity(model.scorer).eval()
    dim = model.shard.dim - model.scorer.bias_columns
    builder = _Builder(dim, kind, similarity.metric)
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
            rows = model.shard.fetch(ids.to(model.shard.rows.device))
            yield np.ascontiguousarray(similarity.points(rows).cpu().numpy())


class _Builder:
    """The index under construction, on rank 0 only."""

    index: Any

    def __init__(self, dim: int, kind: str, metric: str):
        self._arguments, self._metric = (dim, kind), metric

    def start(self) -> None:
        try:
            import faiss
        except ImportError:
            raise KGEError("an index needs FAISS: pip install 'kge-torchrec[index]'") from None
        metric = getattr(faiss, _METRICS[self._metric][0])
        try:
            self.index = faiss.index_factory(*self._arguments, metric)
        except RuntimeError as error:
            raise self._refused(error) from error

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


def _write(model: TrainedModel, builder: _Builder, path: Path, about: dict[str, Any]) -> None:
    import faiss

    files.check_place(path)
    target = path.resolve()  # keeps a symbolic link
    partial = files.partial_of(target)
    try:
        try:
            faiss.write_index(builder.index, str(partial))
        except RuntimeError as error:  # such as a full disk
            raise OSError(f"{path} cannot be written: {error}") from error
        files.sync(partial)
        model.entity_labels.save(path.with_name(about["labels"]))
        files.write_json(path.with_name(f"{path.name}.json"), about)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
