"""Triple classification, and the corruptions that it and a calibration tell from true triples.

A corruption replaces the head or the tail of a true triple. The new entity is drawn uniformly from
all entities ("all"), or from the entities on that side of the relation in train, by frequency
("seen"). "seen" is harder, since most entities have the wrong type; Socher et al. 2013 also draw
from those entities. A corruption is never a triple of the data.

A triple counts as true if its score reaches the threshold of its relation (Socher et al. 2013,
Reasoning With Neural Tensor Networks). The threshold classifies the most triples of that relation
in valid correctly. A relation without triples in valid gets the best threshold for all of valid.

Shapes: T triples, M true and false triples, n corruptions per triple and side, R relations.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from kge_torchrec.config.checks import at_least, one_of
from kge_torchrec.data.sort import chunks, id_counts
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.trained_model import TrainedModel

Among = Literal["seen", "all"]
AMONG = ("seen", "all")
POOL = 256  # sampled triples per relation that corruptions are drawn from
TRIES = 20  # draws per corruption before it is given up because the data holds each draw


class Labelled(NamedTuple):
    """M true and false triples, to be scored by queries for one side."""

    side: Side
    triples: np.ndarray  # (M, 3) int64
    labels: np.ndarray  # (M,) bool


def labelled(
    store: TripleStore, split: str, count: int, among: Among, seed: int, limit: int
) -> list[Labelled]:
    """Return, per side, the triples of a split and ``count`` corruptions of each.

    The result is the same on every rank. A split with more than ``limit`` triples is sampled.

    Raises:
        DataError: The split has no triples.
        ConfigError: ``among`` is unknown, ``limit`` is below 1 or ``seed`` is negative.
    """
    one_of("among", among, AMONG)
    at_least("limit", limit, 1)
    at_least("seed", seed, 0)
    random = np.random.default_rng(seed)
    triples = np.asarray(store.split(split), np.int64)
    if not len(triples):
        raise DataError(f"{store.path} has no {split} triples")
    if len(triples) > limit:
        triples = triples[np.sort(random.choice(len(triples), limit, replace=False))]
    pools = Pools(store, np.unique(triples[:, 1]), random) if among == "seen" else None
    by_side = []
    for side in SIDES:
        false = corrupt(store, triples, side, count, pools, random)
        labels = np.arange(len(triples) + len(false)) < len(triples)
        by_side.append(Labelled(side, np.concatenate([triples, false]), labels))
    return by_side


class Pools:
    """A sample of the training triples of some relations, at most ``POOL`` per relation.

    It reads the training triples twice, one chunk at a time.
    """

    def __init__(self, store: TripleStore, relations: np.ndarray, random: np.random.Generator):
        counts = id_counts(store.train[:, 1], store.num_relations)
        # The n-th triple of relation r has the key r * width + n. These keys are sampled.
        width = int(counts.max(initial=0)) + 1
        keys = np.concatenate(
            [np.empty(0, np.int64)]
            + [
                relation * width + np.sort(random.choice(count, min(count, POOL), replace=False))
                for relation, count in zip(relations, counts[relations], strict=True)
            ]
        )
        parts = [np.empty((0, 3), np.int64)]
        earlier = np.zeros_like(counts)
        for chunk in chunks(store.train):
            chunk = chunk.astype(np.int64)
            chunk = chunk[np.argsort(chunk[:, 1], kind="stable")]
            relation = chunk[:, 1]
            number = np.arange(len(chunk)) - np.searchsorted(relation, relation) + earlier[relation]
            earlier += np.bincount(relation, minlength=len(earlier))
            parts.append(chunk[np.isin(relation * width + number, keys)])
        triples = np.concatenate(parts)
        self._triples = triples[np.argsort(triples[:, 1], kind="stable")]
        self._starts = np.searchsorted(self._triples[:, 1], np.arange(store.num_relations + 1))

    def draw(
        self, side: Side, relations: np.ndarray, random: np.random.Generator, entities: int
    ) -> np.ndarray:
        """Draw an entity (M,) on one side of each relation (M,).

        A relation without sampled triples gets one of all ``entities``.
        """
        starts, stops = self._starts[relations], self._starts[relations + 1]
        any_of_all = random.integers(entities, size=len(relations))
        if not len(self._triples):
            return any_of_all
        place = starts + (random.random(len(relations)) * (stops - starts)).astype(np.int64)
        column = self._triples[:, 0 if side == "head" else 2]
        drawn = column[np.minimum(place, len(column) - 1)]
        return np.where(stops > starts, drawn, any_of_all)


def corrupt(
    store: TripleStore,
    triples: np.ndarray,
    side: Side,
    count: int,
    pools: Pools | None,
    random: np.random.Generator,
) -> np.ndarray:
    """Replace one side of each triple (T, 3) ``count`` times: (M, 3) int64.

    ``pools`` None draws from all entities. M is smaller than T * ``count`` if ``TRIES`` draws gave
    only known triples.
    """
    index, column = store.filter_index(), 0 if side == "head" else 2
    false = np.repeat(triples, count, axis=0)
    anchors, relations = false[:, 2 - column], false[:, 1]
    left = np.arange(len(false))  # rows that are still true triples
    for _ in range(TRIES):
        if pools is None:
            drawn = random.integers(store.num_entities, size=len(left))
        else:
            drawn = pools.draw(side, relations[left], random, store.num_entities)
        false[left, column] = drawn
        known = index.contains(side, anchors[left], relations[left], drawn[:, None])[:, 0]
        left = left[known]
        if not len(left):
            break
    return np.delete(false, left, axis=0)


class Scored(NamedTuple):
    """M labeled triples with their scores."""

    relations: np.ndarray  # (M,) int64
    scores: np.ndarray  # (M,) float32
    labels: np.ndarray  # (M,) bool


def classify(
    model: TrainedModel, among: Among = "seen", seed: int = 0, limit: int = 100_000
) -> dict[str, Any]:
    """Choose thresholds on valid and return the accuracy on test; see ``Run.classify``.

    Each triple has two corruptions, one of its head and one of its tail. A true triple counts
    twice, so half of the triples are true. Tail queries give the scores.
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
    """Return the threshold that classifies the most triples with scores and labels (M,) correctly.

    It is the midpoint of two neighboring scores, or an infinity if one class should get all
    triples, and the lowest of several equally good thresholds.
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
