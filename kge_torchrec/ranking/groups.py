"""The ranks of one ranking, in groups: by relation, by its category, by the answer's frequency.

Nothing is ranked again: every query of a ranking has a group, and metrics are sums over the ranks
of a group.

Shapes: T triples, G groups, N entities, R relations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kge_torchrec.config.checks import one_of
from kge_torchrec.data.store import TripleStore
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.ranking.cardinality import CATEGORIES, cardinalities, categories
from kge_torchrec.ranking.metrics import HITS, KINDS, Ranks, metrics


@dataclass(frozen=True)
class Grouping:
    """Which group each query of a ranking belongs to."""

    about: str  # what a group is, for people
    labels: list[str]  # (G,)
    groups: dict[Side, np.ndarray]  # of each side (T,), places in labels


def by_relation(store: TripleStore, triples: np.ndarray) -> Grouping:
    """A group for each relation of ``triples`` (T, 3), those with most of them first."""
    counts = np.bincount(triples[:, 1], minlength=store.num_relations)
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    place = np.full(store.num_relations, -1, np.int32)
    place[order] = np.arange(len(order))
    groups = place[triples[:, 1]]
    labels = store.relations.labels(order)
    return Grouping("relation of the triple", labels, dict.fromkeys(SIDES, groups))


def by_category(store: TripleStore, triples: np.ndarray) -> Grouping:
    """1-1, 1-N, N-1 and N-N (Bordes et al. 2013), of the triple's relation in train."""
    groups = categories(cardinalities(store))[triples[:, 1]]
    about = (
        "category of the relation in train (Bordes et al. 2013): N where it links an entity with "
        "1.5 or more on that side on average; heads-tails"
    )
    return Grouping(about, [*CATEGORIES, "not in train"], dict.fromkeys(SIDES, groups))


def by_frequency(store: TripleStore, triples: np.ndarray) -> Grouping:
    """How many triples of train have the answer, not the entity asked about: 0, 1, 2-3, 4-7, ..."""
    degrees = store.degrees()
    of = {}
    for side, column in (("head", 0), ("tail", 2)):
        entities, query = np.unique(triples[:, column], return_inverse=True)
        of[side] = degrees.of(entities)[query]
    bins = {side: np.frexp(of[side].astype(np.float64))[1] for side in SIDES}  # of 4 to 7: 3
    last = max(int(part.max(initial=0)) for part in bins.values())
    labels = ["0", "1", *(f"{2**n:,}-{2 ** (n + 1) - 1:,}" for n in range(1, last))]
    about = "triples of train that the answer, the entity to be found, is head or tail of"
    groups = {side: part.astype(np.int32) for side, part in bins.items()}
    return Grouping(about, labels[: last + 1], groups)


GROUPINGS = {"relation": by_relation, "category": by_category, "frequency": by_frequency}


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError for what ranks cannot be grouped by."""
    for name in names:
        one_of("by", name, tuple(GROUPINGS))


def grouped(ranks: Ranks, grouping: Grouping) -> dict[str, Any]:
    """Metrics of all queries and of each group.

    Returns {"about": what a group is, "total": as ``metrics`` gives it, "groups": [{"group": label,
    "head" | "tail" | "both": {"queries": number, ties: {metric: value}}}]}; a side of a group
    without queries has no metrics, and a group without any is left out.
    """
    size = len(grouping.labels)
    sums: dict[str, dict[Any, np.ndarray]] = {
        side: _sums(ranks, side, grouping.groups[side], size) for side in ranks.sides
    }
    sums["both"] = {
        name: np.sum([sums[side][name] for side in ranks.sides], axis=0)
        for name in sums[ranks.sides[0]]
    }
    groups = [
        {"group": label, **{side: _metrics(found, place) for side, found in sums.items()}}
        for place, label in enumerate(grouping.labels)
        if sums["both"]["queries"][place]
    ]
    return {"about": grouping.about, "total": metrics(ranks), "groups": groups}


def _sums(ranks: Ranks, side: Side, groups: np.ndarray, size: int) -> dict[Any, np.ndarray]:
    """Over the queries of each of the groups, (G,) each."""
    sums: dict[Any, np.ndarray] = {"queries": np.bincount(groups, minlength=size)}
    if ranks.outside:
        sums["answers_outside"] = np.bincount(groups[ranks.outside[side]], minlength=size)
    for kind in KINDS:
        values = ranks.values(side, kind)
        sums[kind, "mrr"] = np.bincount(groups, 1 / values, minlength=size)
        sums[kind, "mr"] = np.bincount(groups, values, minlength=size)
        for k in HITS:
            sums[kind, f"hits@{k}"] = np.bincount(groups[values <= k], minlength=size)
    return sums


def _metrics(sums: dict[Any, np.ndarray], place: int) -> dict[str, Any]:
    queries = int(sums["queries"][place])
    found: dict[str, Any] = {"queries": queries}
    for name, values in sums.items():
        if name == "answers_outside":
            found[name] = int(values[place])
        elif isinstance(name, tuple) and queries:
            kind, metric = name
            found.setdefault(kind, {})[metric] = float(values[place] / queries)
    return found
