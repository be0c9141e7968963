"""The parts of a report that need the model: example answers, entity map, ranks by relation.

Shapes: N entities, M of them on the map, D elements per entity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kge_torchrec.answers.predictions import Prediction
from kge_torchrec.trained_run import Run

MAX_ON_MAP = 2000  # entities with the most triples
MAX_NAMED = 25  # entities on the map with a label
EXAMPLES = 6
TOP = 5
_MAX_SCORES = 2e9  # up to this number of scores, ranking test takes seconds


@dataclass(frozen=True)
class Example:
    """A test triple, and the model's answers to the query for its tail."""

    head: str
    relation: str
    tail: str
    answers: list[Prediction]


@dataclass(frozen=True)
class EntityMap:
    """The entities with the most triples, on the first two principal axes of their rows.

    Attributes:
        places: (M, 2).
        degrees: (M,), the training triples of each entity.
        labels: M labels, most triples first.
        explained: The share of the rows' variance along both axes.
    """

    places: np.ndarray
    degrees: np.ndarray
    labels: list[str]
    explained: float


def examples(run: Run, count: int = EXAMPLES, seed: int = 0) -> list[Example]:
    """Return answers to some test triples, drawn with a seed."""
    store = run.model.known("a report")
    triples = np.asarray(store.test, np.int64)
    drawn = np.random.default_rng(seed).permutation(len(triples))[:count]
    results = []
    for head, relation, tail in triples[np.sort(drawn)]:
        head_label, tail_label = store.entities.labels([head, tail])
        (relation_label,) = store.relations.labels([relation])
        answers = run.predict(head=head_label, relation=relation_label, k=TOP)
        results.append(Example(head_label, relation_label, tail_label, answers))
    return results


def entity_map(run: Run) -> EntityMap | None:
    """Return the entity map by principal components; None for fewer than three entities."""
    model = run.model
    store = model.known("a report")
    degrees = store.degrees().of(np.arange(model.num_entities))
    chosen = np.argsort(-degrees, kind="stable")[:MAX_ON_MAP]
    if len(chosen) < 3:
        return None
    rows = model.rows(torch.from_numpy(chosen)).cpu()
    rows = rows - rows.mean(0)
    # The sign of an axis is arbitrary; choose one that is the same on every machine.
    left, spread, _ = torch.linalg.svd(rows.double(), full_matrices=False)
    places = (left * spread)[:, :2]
    places = places * torch.sign(places.gather(0, places.abs().argmax(0, keepdim=True)))
    explained = float(spread[:2].square().sum() / spread.square().sum().clamp_min(1e-30))
    labels = model.entity_labels.labels(chosen)
    return EntityMap(places.numpy(), degrees[chosen], labels, explained)


def ranks_by_relation(run: Run) -> dict[str, Any] | None:
    """Return the result of ``evaluate --by relation``; None if ranking test would take long."""
    store = run.model.known("a report")
    if not len(store.test) or 2.0 * len(store.test) * store.num_entities > _MAX_SCORES:
        return None
    return run.evaluate("test", by=["relation"])["by"]["relation"]
