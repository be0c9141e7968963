"""Content of a report about a model: examples of answers, a map of entities, ranks by relation.

Shapes: M entities on the map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kge_torchrec.answers.predictions import Prediction
from kge_torchrec.trained_run import Run

ON_MAP = 2000  # entities, those with most triples
NAMED = 25  # of those, with their labels
EXAMPLES = 6
TOP = 5
# Scores up to which ranking test again is a matter of seconds.
_QUICK = 2e9


@dataclass(frozen=True)
class Example:
    """A test triple, and the model's answers to the query for its tail."""

    head: str
    relation: str
    tail: str
    answers: list[Prediction]


@dataclass(frozen=True)
class EntityMap:
    """The entities with most triples, on the two principal axes of their rows.

    Attributes:
        places: (M, 2).
        degrees: (M,), training triples per entity.
        labels: (M,), most triples first.
        explained: Share of the rows' variance on both axes.
    """

    places: np.ndarray
    degrees: np.ndarray
    labels: list[str]
    explained: float


def examples(run: Run, count: int = EXAMPLES, seed: int = 0) -> list[Example]:
    """Return the answers to some test triples, drawn by a seed."""
    store = run.model.known("a report")
    triples = np.asarray(store.test, np.int64)
    drawn = np.random.default_rng(seed).permutation(len(triples))[:count]
    found = []
    for head, relation, tail in triples[np.sort(drawn)]:
        head_label, tail_label = store.entities.labels([head, tail])
        (relation_label,) = store.relations.labels([relation])
        answers = run.predict(head=head_label, relation=relation_label, k=TOP)
        found.append(Example(head_label, relation_label, tail_label, answers))
    return found


def entity_map(run: Run) -> EntityMap | None:
    """Return the map, or None for a graph of fewer than three entities."""
    model = run.model
    store = model.known("a report")
    degrees = store.degrees().of(np.arange(model.num_entities))
    chosen = np.argsort(-degrees, kind="stable")[:ON_MAP]
    if len(chosen) < 3:
        return None
    rows = model.rows(torch.from_numpy(chosen)).cpu()
    rows = rows - rows.mean(0)
    # Fix the sign of each axis, which would differ between machines.
    left, spread, _ = torch.linalg.svd(rows.double(), full_matrices=False)
    places = (left * spread)[:, :2]
    places = places * torch.sign(places.gather(0, places.abs().argmax(0, keepdim=True)))
    explained = float(spread[:2].square().sum() / spread.square().sum().clamp_min(1e-30))
    labels = model.entity_labels.labels(chosen)
    return EntityMap(places.numpy(), degrees[chosen], labels, explained)


def ranks_by_relation(run: Run) -> dict[str, Any] | None:
    """Return the groups of ``evaluate --by relation``; None if ranking test would take long."""
    store = run.model.known("a report")
    if not len(store.test) or 2.0 * len(store.test) * store.num_entities > _QUICK:
        return None
    return run.evaluate("test", by=["relation"])["by"]["relation"]
