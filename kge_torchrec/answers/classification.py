"""Triple classification with a score threshold per relation, chosen on valid.

A triple counts as true if its score reaches the threshold of its relation (Socher et al. 2013,
Reasoning With Neural Tensor Networks). The threshold classifies the most triples of that relation
in valid correctly. A relation without triples in valid gets the best threshold for all of valid.

Shapes: M triples, R relations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kge_torchrec.answers.corruptions import Among, labelled
from kge_torchrec.trained_model import TrainedModel


class Scored(NamedTuple):
    """M labeled triples with their scores."""

    relations: np.ndarray  # (M,) int64
    scores: np.ndarray  # (M,) float32
    labels: np.ndarray  # (M,) bool


def classify(
    model: TrainedModel, among: Among = "seen", seed: int = 0, limit: int = 100_000
) -> dict[str, Any]:
    """Choose thresholds on valid and return the accuracy on test.

    Each triple has two corruptions, one of its head and one of its tail. A true triple counts
    twice, so half of the triples are true. Tail queries give the scores.

    Args:
        model: The model, with its data.
        among: Where corruptions are drawn from; see ``corruptions``.
        seed: The seed of samples and corruptions.
        limit: The most triples of a split to use; a larger split is sampled.

    Returns:
        {"accuracy", "triples" (in test), "among", "threshold" (for relations without triples in
        valid), "relations": {label: {"threshold", "accuracy", "triples"}}}. "relations" has the
        relations of test.

    Raises:
        DataError: A split has no triples.
    """
    valid = _scored(model, "valid", among, 2 * seed, limit)
    test = _scored(model, "test", among, 2 * seed + 1, limit)
    thresholds, default_threshold = thresholds_of(valid, model.num_relations)
    right = (test.scores >= thresholds[test.relations]) == test.labels
    relations = np.unique(test.relations)
    by_relation = {
        label: {
            "threshold": float(thresholds[relation]),
            "accuracy": float(right[test.relations == relation].mean()),
            "triples": int(test.labels[test.relations == relation].sum()) // 2,
        }
        for label, relation in zip(
            model.relation_labels.labels(relations), relations.tolist(), strict=True
        )
    }
    return {
        "accuracy": float(right.mean()),
        "triples": int(test.labels.sum()) // 2,
        "among": among,
        "threshold": default_threshold,
        "relations": by_relation,
    }


def _scored(model: TrainedModel, split: str, among: Among, seed: int, limit: int) -> Scored:
    parts = labelled(model.known("triple classification"), split, 1, among, seed, limit)
    triples = np.concatenate([part.triples for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    return Scored(triples[:, 1], model.scores(torch.from_numpy(triples)).numpy(), labels)


def thresholds_of(valid: Scored, num_relations: int) -> tuple[np.ndarray, float]:
    """Return the thresholds (R,) float64 and the threshold for all triples together.

    A relation without triples in ``valid`` gets the common threshold.
    """
    global_threshold = best_threshold(valid.scores, valid.labels)
    thresholds = np.full(num_relations, global_threshold)
    order = np.argsort(valid.relations, kind="stable")
    relations, starts = np.unique(valid.relations[order], return_index=True)
    for relation, part in zip(relations, np.split(order, starts[1:]), strict=True):
        thresholds[relation] = best_threshold(valid.scores[part], valid.labels[part])
    return thresholds, global_threshold


def best_threshold(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the threshold that classifies the most triples correctly.

    Args:
        scores: (M,).
        labels: (M,) bool.

    Returns:
        The midpoint of two neighboring scores, or an infinity if one class should get all triples.
        The lowest of several equally good thresholds.
    """
    values, place = np.unique(scores.astype(np.float64), return_inverse=True)
    false = np.bincount(place, ~labels, len(values))
    true = np.bincount(place, labels, len(values))
    # right[i]: correct triples with the threshold just below values[i].
    right = np.concatenate([[0], np.cumsum(false)]) + true.sum()
    right[1:] -= np.cumsum(true)
    cut = int(right.argmax())
    edges = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
    return float(edges[cut])
