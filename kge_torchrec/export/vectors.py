"""Vectors of queries and items for a search index: their inner product or distance is the score.

A query is a head with a relation, and an item is a tail. A relation has the vectors of the heads
and tails that train has with it. Biases and offsets of inner products are more elements of the
vectors. A distance plus a bias is not a distance, so such models are refused.

Shapes: H queries, M items, E elements per vector, D elements per entity row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from kge_torchrec.errors import ExportError
from kge_torchrec.export.table_files import lists_of
from kge_torchrec.kernels.comparisons import (
    InnerProduct,
    MinusDistance,
    Shifted,
    WithBiases,
)
from kge_torchrec.models.scorers import SIDES, Scorer
from kge_torchrec.models.scorers.operators import OperatedRows
from kge_torchrec.trained_model import TrainedModel

CHUNK = 1 << 16  # queries encoded at once
SCORES = {  # the score by the vectors
    "inner product": "the inner product of query and item",
    "euclidean": "minus the Euclidean distance of query and item",
    "squares": "minus the squared Euclidean distance of query and item",
    "manhattan": "minus the Manhattan distance of query and item",
    "moduli": "minus the sum of the moduli of the differences of complex numbers re, im, ...",
}


def metric_of(scorer: Scorer) -> str:
    """Return the key of ``SCORES`` by which vectors give a scorer's scores.

    Raises:
        ExportError: There is none.
    """
    comparison, is_plain = scorer.row_comparison, True
    while isinstance(comparison, Shifted | WithBiases):
        comparison, is_plain = comparison.inner, False
    if isinstance(comparison, OperatedRows) and not comparison.operates_on_tails:
        is_cosine = comparison.comparator == "cosine"
        comparison = InnerProduct() if is_cosine else MinusDistance("euclidean")
    if isinstance(comparison, InnerProduct):
        return "inner product"
    why = "its score is neither an inner product nor a distance of two vectors"
    if isinstance(comparison, MinusDistance):
        why = "its score is a distance plus a bias or an offset"
        if comparison.kind not in SCORES:
            why = "its distance changes the vector of an entity by the relation"
        elif is_plain:
            return comparison.kind
    raise ExportError(
        f"{scorer.name or type(scorer).__name__} has no vectors for a search index: {why}; "
        "`kge-torchrec recommend` and `serve` answer with every scorer"
    )


def query_vectors(scorer: Scorer, anchor: Tensor, relation: Tensor) -> Tensor:
    """Return the vectors of tail queries: rows (H, D), relation ids (H,) -> (H, E)."""

    def vectors(comparison: Any, query: Any) -> Tensor:
        if isinstance(comparison, Shifted):
            return torch.cat([vectors(comparison.inner, query[0]), query[1]], 1)
        if isinstance(comparison, WithBiases):
            inner, bias, _ = query
            own = () if comparison.adds_columns else (torch.ones_like(bias),)
            return torch.cat([vectors(comparison.inner, inner), *own, bias], 1)
        if isinstance(comparison, OperatedRows):
            return comparison.vectors(query[0], True)
        return query

    return vectors(scorer.row_comparison, scorer.encode(anchor, relation, "tail"))


def item_vectors(scorer: Scorer, rows: Tensor) -> Tensor:
    """Return the vectors of tails: entity rows (M, D) -> (M, E)."""

    def vectors(comparison: Any, rows: Tensor) -> Tensor:
        ones = torch.ones_like(rows[:, :1])
        if isinstance(comparison, Shifted):
            return torch.cat([vectors(comparison.inner, rows), ones], 1)
        if isinstance(comparison, WithBiases):
            if comparison.adds_columns:
                return torch.cat([rows, ones], 1)
            vector, bias = comparison.split(rows, "tail")
            return torch.cat([vectors(comparison.inner, vector), bias, ones], 1)
        return comparison.vectors(rows, False) if isinstance(comparison, OperatedRows) else rows

    return vectors(scorer.row_comparison, scorer.entity(rows))


def write_vectors(folder: Path, model: TrainedModel, relation: str | None) -> dict[str, Any]:
    """Write the vectors of each relation, with their labels, as Parquet.

    This process has all rows of the model. ``relation`` is a label; None: every relation. Returns
    what the score is, the dim of the vectors, and the folder of each relation.
    """
    relations = range(model.num_relations)
    if relation is not None:
        number = int(model.relation_ids(relation))
        relations = range(number, number + 1)
    about: list[dict[str, Any]] = []
    for number, label in zip(relations, model.relation_labels.labels(relations), strict=True):
        queries, items = (model.frequencies.pairs(side, number)[0] for side in SIDES)
        own = folder / f"{number}"
        own.mkdir()
        with torch.no_grad():
            parts = [
                query_vectors(model.scorer, model.rows(ids), torch.full_like(ids, number))
                for ids in torch.from_numpy(queries).split(CHUNK)
            ]
            vectors = item_vectors(model.scorer, model.rows(torch.from_numpy(items)))
        _write(own / "queries.parquet", model, queries, torch.cat(parts).numpy())
        _write(own / "items.parquet", model, items, vectors.numpy())
        counts = {"queries": len(queries), "items": len(items)}
        about.append({"relation": label, "folder": f"{number}", **counts})
    metric = metric_of(model.scorer)
    return {
        "score": SCORES[metric], "metric": metric, "dim": vectors.shape[1], "relations": about,
    }  # fmt: skip


def _write(file: Path, model: TrainedModel, entities: np.ndarray, vectors: np.ndarray) -> None:
    import pyarrow.parquet as pq  # starts threads

    labels = model.entity_labels.array.take(pa.array(entities))
    pq.write_table(pa.table({"label": labels, "vector": lists_of(vectors)}), file)
