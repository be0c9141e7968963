"""Recommendation: ranks the answers of a split for each user, and the metrics of the users' lists.

A user is a query with answers in the split: a pair (head, relation) whose answers are tails. All
candidates compete except the user's known answers, those of train and valid where test is ranked.
The answers of a split do not compete with each other: the i-th best one has rank i plus the number
of better candidates that are no answers. A tie counts half. A score of NaN counts against the
model.

Metrics at k are those of LightGCN's published code (He et al. 2020, code/utils.py), where it has
them. They are computed per user and averaged over the users:

- recall: hits, the answers among the first k, divided by the user's answers
- precision: hits / k
- hit_rate: 1 if there is a hit
- ndcg: the sum of 1 / log2(rank + 1) over the hits, divided by that of min(k, answers) hits on top
- map: the sum of (hits up to this one) / rank over the hits, divided by min(k, answers)
- auc, without k: the share of the competing candidates below an answer, averaged over the answers
- coverage: the share of all candidates that are on the list of any user; equal scores come in
  order of id there

Shapes: U users, A answers, k entries of a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kge_torchrec.data.store.filter_index import FilterIndex
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.ranking.blocks import Scores
from kge_torchrec.ranking.groups import Grouping
from kge_torchrec.ranking.ranks import ranked_among
from kge_torchrec.ranking.search import ALL_ENTITIES, RankOptions, by_query, columns, compare
from kge_torchrec.tables import Cell, table

_COLUMNS = ("recall", "ndcg", "hit_rate", "precision", "map", "coverage")


@dataclass(frozen=True)
class Recommendations:
    """The ranks of all answers and the list of each user.

    Attributes:
        side: The side that is recommended.
        triples: (A, 3) int64; users in order of relation and anchor, their best answers first.
        starts: (U,) int64, where the answers of each user start.
        ranks: (A,) float64, from 1; infinite for an answer that cannot be recommended: it is known,
            no candidate, or its score is NaN.
        below: (A,) float64, the share of the competing candidates that score below the answer.
        lists: (U, k) int64, the best candidates of each user; -1 where there are fewer.
        candidates: The number of entities that are a candidate of some user.
        restricted: A description of restricted candidates; None for all entities.
    """

    side: Side
    triples: np.ndarray
    starts: np.ndarray
    ranks: np.ndarray
    below: np.ndarray
    lists: np.ndarray
    candidates: int
    restricted: str | None

    def listed(self) -> np.ndarray:
        """Return the lists as triples (U * k, 3); where a list ends, its triples mean nothing."""
        of_users = self.triples[self.starts].repeat(self.lists.shape[1], axis=0)
        of_users[:, columns(self.side)[1]] = np.maximum(self.lists, 0).ravel()
        return of_users


def sample_users(triples: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """Return the triples of random users, at most ``limit`` of them but at least one user."""
    order, starts = by_query(triples)
    counts = np.diff(starts, append=len(triples))
    drawn = np.random.default_rng(seed).permutation(len(starts))
    fitting = np.searchsorted(np.cumsum(counts[drawn]), limit, "right")
    chosen = np.zeros(len(starts), bool)
    chosen[drawn[: max(1, fitting)]] = True
    return triples[np.sort(order[np.repeat(chosen, counts)])]


def recommend(
    scores: Scores,
    triples: np.ndarray,
    known: FilterIndex,
    k: int,
    options: RankOptions = ALL_ENTITIES,
    side: Side = "tail",
) -> Recommendations:
    """Rank the answers of every user and list the user's k best candidates. Collective.

    The answers are those of triples (A, 3) int64 on a side, at least one, the same on every rank.
    Answers of ``known`` are not recommended. Without lists, k is 0.
    """
    triples, candidates, shard = np.asarray(triples, np.int64), options.candidates, scores.shard
    counts = compare(scores, triples, side, known, options, min(k, shard.num_entities))
    total = shard.num_entities
    if candidates is not None:
        relations = np.unique(triples[:, 1]).tolist()
        masks = [candidates.mask(side, relation, *shard.row_range) for relation in relations]
        total = int(reduced(torch.tensor(int(np.any(masks, 0).sum()), device=shard.device)))
    user = np.repeat(np.arange(len(counts.starts)), np.diff(counts.starts, append=len(triples)))
    can_be_recommended = counts.has_score & counts.is_inside & ~counts.is_known
    better = np.where(can_be_recommended, counts.better + counts.equal / 2, np.inf)
    order = np.lexsort((better, user))
    better, pool = better[order], counts.pool[order]
    return Recommendations(
        side=side,
        triples=triples[counts.order][order],
        starts=counts.starts,
        ranks=np.arange(len(user)) - counts.starts[user] + 1 + better,
        below=1 - np.minimum(better, pool) / np.maximum(pool, 1),
        lists=counts.lists,
        candidates=total,
        restricted=None if candidates is None else candidates.label,
    )


def recommendation_metrics(ranked: Recommendations, cutoffs: Sequence[int]) -> dict[str, Any]:
    """Return the metrics of recommendations, averaged over the users.

    Returns:
        {"recommendation": {"users", "answers", "candidates", "auc", "recall@k", "ndcg@k",
        "hit_rate@k", "precision@k", "map@k", "coverage@k" for each k}}. With restricted
        candidates also "candidates", as of ``ranks.metrics``; its "answers_outside" also has
        the known answers.
    """
    results: dict[str, Any] = {}
    if ranked.restricted is not None:
        outside = {ranked.side: int(np.isinf(ranked.ranks).sum())}
        results = {"candidates": {"restricted_to": ranked.restricted, "answers_outside": outside}}
    sizes = {"users": len(ranked.starts), "answers": len(ranked.ranks)}
    everything = means(ranked, cutoffs)
    covered = {f"coverage@{k}": _coverage(ranked, ranked.lists[:, :k].ravel()) for k in cutoffs}
    return results | {
        "recommendation": sizes | {"candidates": ranked.candidates} | everything | covered
    }


def _coverage(ranked: Recommendations, entities: np.ndarray) -> float:
    return len(np.unique(entities[entities >= 0])) / max(1, ranked.candidates)


def means(
    ranked: Recommendations, cutoffs: Sequence[int], chosen: np.ndarray | slice = slice(None)
) -> dict[str, float]:
    """Return the means of each metric over the users with chosen answers, (A,) bool."""
    total = len(ranked.ranks)
    user = np.repeat(np.arange(len(ranked.starts)), np.diff(ranked.starts, append=total))
    user, ranks = user[chosen], ranked.ranks[chosen]
    starts = np.flatnonzero(np.diff(user, prepend=-1))
    counts = np.diff(starts, append=len(user))
    position = np.arange(len(user)) - np.repeat(starts, counts) + 1
    gains = 1 / np.log2(np.arange(1, counts.max() + 1) + 1)

    def of_users(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values.astype(np.float64), starts)

    results = {"auc": float((of_users(ranked.below[chosen]) / counts).mean())}
    for k in cutoffs:
        is_hit = ranks <= k
        hits, ideal = of_users(is_hit), np.minimum(counts, k)
        per_user = {
            "recall": hits / counts,
            "ndcg": of_users(is_hit / np.log2(ranks + 1)) / np.cumsum(gains)[ideal - 1],
            "hit_rate": hits > 0,
            "precision": hits / k,
            "map": of_users(is_hit * position / ranks) / ideal,
        }
        results |= {f"{name}@{k}": float(values.mean()) for name, values in per_user.items()}
    return results


def grouped_recommendations(
    ranked: Recommendations, cutoffs: Sequence[int], grouping: Grouping
) -> dict[str, Any]:
    """Return the metrics of each group of answers.

    A group's metrics are those of its answers and of the users that have some. Two figures are of
    the lists: "listed@k" is the share of all list entries that belong to the group, and
    "coverage@k" the share of all candidates that these entries are.

    The grouping has the group of each answer and of each triple of ``listed``: (A + U * k,).

    Returns:
        {"about", "total": the result of ``recommendation_metrics``, "groups": [{"group": label,
        "recommendation": {"answers", "listed@k", "coverage@k", and the other metrics where the
        group has answers}}]}. Groups with neither answers nor list entries are left out.
    """
    of_answers, of_lists = np.split(grouping.groups[ranked.side], [len(ranked.ranks)])
    of_lists = np.where(ranked.lists < 0, -1, of_lists.reshape(ranked.lists.shape))
    results = []
    for place, label in enumerate(grouping.labels):
        chosen, entries = of_answers == place, of_lists == place
        if not chosen.any() and not entries.any():
            continue
        stats: dict[str, Any] = {"answers": int(chosen.sum())}
        for k in cutoffs:
            listed, of_group = ranked.lists[:, :k], entries[:, :k]
            stats[f"listed@{k}"] = float(of_group.sum() / max(1, (listed >= 0).sum()))
            stats[f"coverage@{k}"] = _coverage(ranked, listed[of_group])
        if chosen.any():
            stats |= means(ranked, cutoffs, chosen)
        results.append({"group": label, "recommendation": stats})
    total = recommendation_metrics(ranked, cutoffs)
    return {"about": grouping.about, "total": total, "groups": results}


def recommendation_table(results: dict[str, Any]) -> str:
    """Return the metrics as a table, a line per k for the model and each baseline, and the AUC."""
    stats, baselines = results["recommendation"], results.get("recommendation_baselines", {})
    cutoffs = [name.partition("@")[2] for name in stats if name.startswith("recall@")]
    users = f"{stats['users']:,} users with {stats['answers']:,} answers"
    beside = {"": stats} if not baselines else {"model": stats, **baselines}
    rows: list[dict[str, Cell]] = [
        {"k": int(k), **({"by": name} if name else {}),
         **{column: values.get(f"{column}@{k}") for column in _COLUMNS}}
        for k in cutoffs for name, values in beside.items() if values is not None
    ]  # fmt: skip
    lines = [f"{ranked_among(results)}: {users}", table(rows), f"AUC {stats['auc']:.4f}"]
    lines += [
        f"{name} is left out: it would take too long" for name, x in beside.items() if x is None
    ]
    return "\n".join(lines)
