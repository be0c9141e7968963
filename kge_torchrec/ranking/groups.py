"""Groups the ranks of a ranking: by relation, by category of the relation, by answer frequency.

No query is ranked again. Each query has a group, and its metrics are means over the ranks.

Shapes: T triples, G groups.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np

from kge_torchrec.data import RELATION, answer_column
from kge_torchrec.data.sort import chunks, id_counts
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import relations_of
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.ranking.ranks import HITS, KINDS, Ranks, metrics, ranked_among
from kge_torchrec.tables import cut, table

THRESHOLD = 1.5  # mean entities from which a side is "N" (Bordes et al. 2013)
CATEGORIES = ("1-1", "1-N", "N-1", "N-N")
LINES = 30  # groups in a table
_OF_RANKS = (
    ("both", "mrr"), ("head", "mrr"), ("head", "hits@10"), ("tail", "mrr"), ("tail", "hits@10"),
)  # fmt: skip
_OF_LISTS = ("recall", "ndcg", "hit_rate", "listed", "coverage")
_WIDEST = 48  # characters per label


@dataclass(frozen=True)
class Grouping:
    """The group of each query of a ranking."""

    about: str  # a description of the groups, for display
    labels: list[str]  # (G,)
    groups: dict[Side, np.ndarray]  # per side (T,): indices in labels


def by_relation(store: TripleStore, triples: np.ndarray) -> Grouping:
    """Group by relation; relations with the most ``triples`` (T, 3) come first."""
    counts = np.bincount(triples[:, 1], minlength=store.num_relations)
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    place = np.full(store.num_relations, -1, np.int32)
    place[order] = np.arange(len(order))
    groups = place[triples[:, 1]]
    labels = store.relations.labels(order)
    return Grouping("relation of the triple", labels, dict.fromkeys(SIDES, groups))


def by_category(store: TripleStore, triples: np.ndarray) -> Grouping:
    """Group by the category of the relation in train: 1-1, 1-N, N-1 or N-N.

    A relation is 1-N if it links a head to at least 1.5 tails on average, but a tail to fewer
    heads (Bordes et al. 2013, Translating Embeddings).
    """
    relations = store.num_relations
    count, pairs = id_counts(store.train[:, RELATION], relations), {}
    for side in SIDES:
        pairs[side] = np.zeros(relations, np.int64)
        for queries in chunks(store.side_index("train", side).queries):
            pairs[side] += np.bincount(relations_of(queries), minlength=relations)
    many_tails, many_heads = (count >= THRESHOLD * pairs[side] for side in ("tail", "head"))
    place = np.where(count, 2 * many_heads + many_tails, len(CATEGORIES))
    groups = place[triples[:, 1]]
    about = (
        "category of the relation in train (Bordes et al. 2013): N where it links an entity with "
        "1.5 or more on that side on average; heads-tails"
    )
    return Grouping(about, [*CATEGORIES, "not in train"], dict.fromkeys(SIDES, groups))


def by_frequency(store: TripleStore, triples: np.ndarray) -> Grouping:
    """Group by the number of training triples that contain the answer: 0, 1, 2-3, 4-7, ..."""
    bins: dict[Side, np.ndarray] = {}
    for side in SIDES:
        entities = triples[:, answer_column(side)]
        degrees = np.sum([store.degrees(end)[entities] for end in SIDES], axis=0)
        bins[side] = np.frexp(degrees.astype(np.float64))[1]  # 4 to 7: bin 3
    last = max(int(part.max(initial=0)) for part in bins.values())
    labels = ["0", "1", *(f"{2**n:,}-{2 ** (n + 1) - 1:,}" for n in range(1, last))]
    about = "triples of train that the answer, the entity to be found, is head or tail of"
    groups = {side: part.astype(np.int32) for side, part in bins.items()}
    return Grouping(about, labels[: last + 1], groups)


GROUPINGS = {
    "relation": by_relation,
    "category": by_category,
    "frequency": by_frequency,
    "popularity": by_frequency,  # the word for items
}


def grouped(ranks: Ranks, grouping: Grouping) -> dict[str, Any]:
    """Return the metrics of all queries and of each group.

    Returns:
        {"about": description of the groups, "total": the result of ``metrics``, "groups":
        [{"group": label, "head" | "tail" | "both": {"queries": number, kind: {metric: value}}}]}.
        Groups without queries are left out. A side without queries has no metrics.
    """
    size = len(grouping.labels)
    sums: dict[str, dict[Any, np.ndarray]] = {
        side: _sums(ranks, side, grouping.groups[side], size) for side in SIDES
    }
    sums["both"] = {name: sums["head"][name] + sums["tail"][name] for name in sums["head"]}
    groups = [
        {"group": label, **{side: _metrics(its_sums, place) for side, its_sums in sums.items()}}
        for place, label in enumerate(grouping.labels)
        if sums["both"]["queries"][place]
    ]
    return {"about": grouping.about, "total": metrics(ranks), "groups": groups}


def _sums(ranks: Ranks, side: Side, groups: np.ndarray, size: int) -> dict[Any, np.ndarray]:
    """Return the sums of each metric over the queries of each group, (G,) each."""
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
    means: dict[str, Any] = {"queries": queries}
    for name, values in sums.items():
        if name == "answers_outside":
            means[name] = int(values[place])
        elif isinstance(name, tuple) and queries:
            kind, metric = name
            means.setdefault(kind, {})[metric] = float(values[place] / queries)
    return means


def groups_table(name: str, results: dict[str, Any]) -> str:
    """Return the result of ``grouped`` or ``grouped_recommendations`` as a table.

    Of ranks, it has the realistic metrics; of recommendations, the metrics of the longest lists.
    The table fits the terminal, or 80 columns without one.
    """
    groups = results["groups"]
    rows = [{name: cut(group["group"], _WIDEST), **_cells(group)} for group in groups[:LINES]]
    lines = [
        f"by {name}: {results['about']}; {ranked_among(results['total'])}",
        table(rows, width=shutil.get_terminal_size().columns),
    ]
    if len(groups) > LINES:
        lines.append(f"and {len(groups) - LINES:,} more groups, in --format json")
    return "\n".join(lines)


def _cells(group: dict[str, Any]) -> dict[str, float | None]:
    """Return the values of a group by the heading of their column."""
    if lists := group.get("recommendation"):
        longest = max(int(name[7:]) for name in lists if name.startswith("listed@"))
        of_lists = {f"\n{metric}": lists.get(f"{metric}@{longest}") for metric in _OF_LISTS}
        return {"\nanswers": lists["answers"]} | of_lists
    means = {side: group[side].get("realistic", {}) for side, _ in _OF_RANKS}
    of_ranks = {f"{side}\n{metric}": means[side].get(metric) for side, metric in _OF_RANKS}
    return {"both\nqueries": group["both"]["queries"]} | of_ranks
