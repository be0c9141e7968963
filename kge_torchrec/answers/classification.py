"""Triple classification: is a triple true?  A threshold for each relation, chosen on valid.

After Socher et al. 2013 (Reasoning With Neural Tensor Networks): a triple is taken for true if its
score reaches the threshold of its relation, the one that gets most of valid right.  A relation
that valid does not have gets the threshold that gets most of all of valid right.

Shapes: M triples, R relations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kge_torchrec.answers.corruptions import Among, labelled
from kge_torchrec.answers.model import AnsweringModel


class Scored(NamedTuple):
    """M triples that are known to be true or false."""

    relations: np.ndarray  # (M,) int64
    scores: np.ndarray  # (M,) float32
    labels: np.ndarray  # (M,) bool


def classify(
    model: AnsweringModel, among: Among = "seen", seed: int = 0, limit: int = 100_000
) -> dict[str, Any]:
    """Thresholds from valid, and the share of test that they get right.

    Beside each triple stand a corruption of its head and one of its tail; a true triple counts
    twice, so that half of all are true.  With reciprocal relations the tail's query scores.
    limit: triples of either split that are used at most, a sample.

    Returns {"accuracy", "triples" (of test), "among", "threshold" (for relations that valid does
    not have), "relations": {label: {"threshold", "accuracy", "triples"}}} with the relations of
    test.  Raises DataError for a split without triples.
    """
    valid = _scored(model, "valid", among, 2 * seed, limit)
    test = _scored(model, "test", among, 2 * seed + 1, limit)
    thresholds, of_others = thresholds_of(valid, model.num_relations)
    right = (test.scores >= thresholds[test.relations]) == test.labels
    found = np.unique(test.relations)
    of_relation = {
        label: {
            "threshold": float(thresholds[relation]),
            "accuracy": float(right[test.relations == relation].mean()),
            "triples": int(test.labels[test.relations == relation].sum()) // 2,
        }
        for label, relation in zip(model.relations.labels(found), found.tolist(), strict=True)
    }
    return {
        "accuracy": float(right.mean()),
        "triples": int(test.labels.sum()) // 2,
        "among": among,
        "threshold": of_others,
        "relations": of_relation,
    }


def _scored(model: AnsweringModel, split: str, among: Among, seed: int, limit: int) -> Scored:
    parts = labelled(model.known("triple classification"), split, 1, among, seed, limit)
    triples = np.concatenate([part.triples for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    return Scored(triples[:, 1], model.scores(torch.from_numpy(triples)).numpy(), labels)


def thresholds_of(valid: Scored, num_relations: int) -> tuple[np.ndarray, float]:
    """(R,) float64, and the one of all relations together, which those without triples get."""
    of_all = best_threshold(valid.scores, valid.labels)
    thresholds = np.full(num_relations, of_all)
    order = np.argsort(valid.relations, kind="stable")
    found, starts = np.unique(valid.relations[order], return_index=True)
    for relation, part in zip(found, np.split(order, starts[1:]), strict=True):
        thresholds[relation] = best_threshold(valid.scores[part], valid.labels[part])
    return thresholds, of_all


def best_threshold(scores: np.ndarray, labels: np.ndarray) -> float:
    """The score from which on a triple is taken for true, of scores (M,) and labels (M,) bool.

    Halfway between the two scores that it parts; the lowest of several that are as good, infinite
    where all or none should be.
    """
    values, place = np.unique(scores.astype(np.float64), return_inverse=True)
    false = np.bincount(place, ~labels, len(values))
    true = np.bincount(place, labels, len(values))
    # With the threshold before the i-th value, false ones below and true ones from there are right.
    right = np.concatenate([[0], np.cumsum(false)]) + true.sum()
    right[1:] -= np.cumsum(true)
    cut = int(right.argmax())
    edges = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
    return float(edges[cut])
