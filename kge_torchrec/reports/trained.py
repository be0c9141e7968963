"""What a report says of a run's model: examples of answers, a map of entities, ranks by relation.

Shapes: N entities, M of them on the map, D numbers an entity.
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
    """A test triple, and what the model answers when asked for its tail."""

    head: str
    relation: str
    tail: str
    answers: list[Prediction]


@dataclass(frozen=True)
class EntityMap:
    """The entities with most triples, on the two principal axes of their rows.

    places: (M, 2); degrees: (M,) training triples; labels: (M,), most triples first.
    explained: the share of the rows' variance that both axes have.
    """

    places: np.ndarray
    degrees: np.ndarray
    labels: list[str]
    explained: float


def examples(run: Run, count: int = EXAMPLES, seed: int = 0) -> list[Example]:
    """Answers to some test triples, drawn by a seed."""
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
    """By principal components; None for a graph of fewer than three entities."""
    model = run.model
    store = model.known("a report")
    degrees = store.degrees().of(np.arange(model.num_entities))
    chosen = np.argsort(-degrees, kind="stable")[:ON_MAP]
    if len(chosen) < 3:
        return None
    rows = model.rows(torch.from_numpy(chosen)).cpu()
    rows = rows - rows.mean(0)
    # The sign of an axis is nobody's choice; this one is the same on every machine.
    left, spread, _ = torch.linalg.svd(rows.double(), full_matrices=False)
    places = (left * spread)[:, :2]
    places = places * torch.sign(places.gather(0, places.abs().argmax(0, keepdim=True)))
    explained = float(spread[:2].square().sum() / spread.square().sum().clamp_min(1e-30))
    labels = model.entity_labels.labels(chosen)
    return EntityMap(places.numpy(), degrees[chosen], labels, explained)


def ranks_by_relation(run: Run) -> dict[str, Any] | None:
    """As ``evaluate --by relation`` has it; None where ranking test again would take long."""
    store = run.model.known("a report")
    if not len(store.test) or 2.0 * len(store.test) * store.num_entities > _QUICK:
        return None
    return run.evaluate("test", by=["relation"])["by"]["relation"]
