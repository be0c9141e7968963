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

Shapes: U users, A answers, B users of a batch, n rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data.store.filter_index import Answers, FilterIndex, Ranges
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.kernels.operators import count_block
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.ranking.blocks import erase, local_scores, restrict, scoring, triple_scores
from kge_torchrec.ranking.exact import RankOptions, are_candidates
from kge_torchrec.ranking.groups import Grouping
from kge_torchrec.ranking.metrics import ranked_among
from kge_torchrec.ranking.topk import NOTHING, best_of_ranks, with_block

_COLUMNS = ("recall", "ndcg", "hit_rate", "precision", "map", "coverage")
_TAILS = RankOptions(sides=("tail",))


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
        of_users[:, _columns(self.side)[1]] = np.maximum(self.lists, 0).ravel()
        return of_users


def users_of(triples: np.ndarray, side: Side = "tail") -> tuple[np.ndarray, np.ndarray]:
    """Return the order of triples (A,) by user and answer, and where each user starts: (U,)."""
    anchor, answer = _columns(side)
    order = np.lexsort(triples[:, [answer, anchor, 1]].T)
    pairs = triples[order][:, [anchor, 1]]
    is_first = np.ones(len(pairs), bool)
    is_first[1:] = (pairs[1:] != pairs[:-1]).any(1)
    return order, np.flatnonzero(is_first)


def _columns(side: Side) -> tuple[int, int]:
    """Return the columns of the anchor and the answer."""
    return (0, 2) if side == "tail" else (2, 0)


def sample_users(triples: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """Return the triples of random users, at most ``limit`` of them but at least one user."""
    order, starts = users_of(triples)
    counts = np.diff(starts, append=len(triples))
    drawn = np.random.default_rng(seed).permutation(len(starts))
    fitting = np.searchsorted(np.cumsum(counts[drawn]), limit, "right")
    chosen = np.zeros(len(starts), bool)
    chosen[drawn[: max(1, fitting)]] = True
    return triples[np.sort(order[np.repeat(chosen, counts)])]


def recommend(
    scorer: Scorer,
    shard: EntityShard,
    triples: np.ndarray,
    known: FilterIndex,
    k: int,
    options: RankOptions = _TAILS,
) -> Recommendations:
    """Rank the answers of every user and list the user's k best candidates. Collective.

    Args:
        scorer: The scorer.
        shard: The entity rows of this rank.
        triples: (A, 3) int64 head, relation, tail, at least one; the same on every rank.
        known: Triples whose answers are not recommended.
        k: The length of the lists.
        options: The side, a single one; candidates, and the pieces of the ranking.
    """
    (side,) = options.sides
    order, starts = users_of(triples, side)
    triples, bounds = np.asarray(triples, np.int64)[order], np.append(starts, len(triples))
    one = _Users(scorer, shard, known, min(k, shard.num_entities), options)
    batches = []
    for first in range(0, len(starts), options.batch_size):
        ends = bounds[first : first + options.batch_size + 1]
        batches.append(one.rank(triples[ends[0] : ends[-1]], ends - ends[0]))
        if options.progress is not None:
            options.progress(int(ends[-1] - ends[0]))
    better, pool, lists = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    user = np.repeat(np.arange(len(starts)), np.diff(bounds))
    pool = pool[user]
    order = np.lexsort((better, user))
    better = better[order]
    return Recommendations(
        side=side,
        triples=triples[order],
        starts=starts,
        ranks=np.arange(len(user)) - starts[user] + 1 + better,
        below=1 - np.minimum(better, pool) / np.maximum(pool, 1),
        lists=lists,
        candidates=one.candidates_of(np.unique(triples[:, 1])),
        restricted=None if options.candidates is None else options.candidates.label,
    )


@dataclass(frozen=True)
class _Users:
    """Ranks the answers of a batch of users."""

    scorer: Scorer
    shard: EntityShard
    known: FilterIndex
    k: int
    options: RankOptions

    def rank(
        self, triples: np.ndarray, bounds: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what is better than each answer, and the lists. Collective.

        Args:
            triples: (A, 3) int64 of whole users, in order of relation, anchor and answer.
            bounds: (B + 1,) int64, where the answers of each user start and stop.

        Returns:
            The competing candidates above each answer (A,) float64, infinite for an answer that
            cannot be recommended; competing candidates per user (B,) int64; lists (B, k) int64.
        """
        (side,), device = self.options.sides, self.shard.device
        anchor, answer = _columns(side)
        users, size = triples[bounds[:-1]], len(bounds) - 1
        user = np.repeat(np.arange(size), np.diff(bounds))
        true = triple_scores(self.scorer, self.shard, torch.from_numpy(triples), side).to(device)
        # One more value per user, infinity, counts its competing candidates.
        values = torch.cat([true, torch.full((size,), torch.inf, device=device)])
        query = torch.from_numpy(np.append(user, np.arange(size))).to(device)
        counts = torch.zeros(2, len(values), dtype=torch.int64, device=device)
        best = torch.full((size, self.k), NOTHING, device=device)
        own = [Ranges(triples[:, answer].copy(), bounds[:-1], bounds[1:])]
        with scoring(self.scorer):
            for first, scores in self._competing(users[:, anchor], users[:, 1]):
                best = with_block(best, scores, first)
                erase(scores, first, Answers(size, own), torch.nan)
                count_block(scores, values, counts[0], counts[1], query)
        less, equal = reduced(counts).cpu().numpy()
        competing = (less + equal)[len(user) :]
        above = (competing[user] - less[: len(user)]) - equal[: len(user)] / 2
        above[~self._can_be_recommended(triples, true)] = np.inf
        return above, competing, best_of_ranks(best, self.shard.ranks)[1].cpu().numpy()

    def _competing(
        self, anchors: np.ndarray, relations: np.ndarray
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield blocks of scores (B, n) in which known answers and no candidates are NaN."""
        (side,), device = self.options.sides, self.shard.device
        known = self.known.answers(side, anchors, relations)
        rows = self.shard.fetch(torch.from_numpy(anchors.copy()).to(device))
        relation = torch.from_numpy(relations.copy())
        inputs = rows, relation.to(device), side, self.options.block_bytes
        for first, scores in local_scores(self.scorer, self.shard, *inputs):
            scores.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            erase(scores, first, known, torch.nan)
            if self.options.candidates is not None:
                restrict(scores, first, self.options.candidates, (relation, side), torch.nan)
            yield first, scores

    def _can_be_recommended(self, triples: np.ndarray, true: Tensor) -> np.ndarray:
        """Return which answers (A,) are new to their users, candidates, and scored."""
        (side,), candidates = self.options.sides, self.options.candidates
        anchor, answer = _columns(side)
        anchors, answers = triples[:, anchor], triples[:, answer, None]
        is_known = self.known.contains(side, anchors, triples[:, 1], answers)[:, 0]
        can = ~is_known & ~true.isnan().cpu().numpy()
        if candidates is not None:
            can &= are_candidates(candidates, triples, side, self.options.batch_size)
        return can

    def candidates_of(self, relations: np.ndarray) -> int:
        """Return the number of entities that are candidates of some relation. Collective."""
        if self.options.candidates is None:
            return self.shard.num_entities
        (side,), (first, stop) = self.options.sides, self.shard.row_range
        some = np.zeros(stop - first, bool)
        for relation in relations.tolist():
            some |= self.options.candidates.mask(side, relation, first, stop)
        return int(reduced(torch.tensor(int(some.sum()), device=self.shard.device)))


def recommendation_metrics(ranked: Recommendations, cutoffs: Sequence[int]) -> dict[str, Any]:
    """Return the metrics of recommendations, averaged over the users.

    Returns:
        {"recommendation": {"users", "answers", "candidates", "auc", "recall@k", "ndcg@k",
        "hit_rate@k", "precision@k", "map@k", "coverage@k" for each k}}. With restricted
        candidates also "candidates", as of ``metrics.metrics``; its "answers_outside" also has
        the known answers.
    """
    results: dict[str, Any] = {}
    if ranked.restricted is not None:
        outside = {ranked.side: int(np.isinf(ranked.ranks).sum())}
        results = {"candidates": {"restricted_to": ranked.restricted, "answers_outside": outside}}
    sizes = {"users": len(ranked.starts), "answers": len(ranked.ranks)}
    everything = _means(ranked, cutoffs, np.ones(len(ranked.ranks), bool))
    covered = {f"coverage@{k}": _coverage(ranked, ranked.lists[:, :k].ravel()) for k in cutoffs}
    return results | {
        "recommendation": sizes | {"candidates": ranked.candidates} | everything | covered
    }


def _coverage(ranked: Recommendations, entities: np.ndarray) -> float:
    return len(np.unique(entities[entities >= 0])) / max(1, ranked.candidates)


def _means(ranked: Recommendations, cutoffs: Sequence[int], chosen: np.ndarray) -> dict[str, float]:
    """Return the means of each metric over the users with chosen answers, (A,) bool."""
    user = np.repeat(np.arange(len(ranked.starts)), np.diff(ranked.starts, append=len(chosen)))
    user, ranks = user[chosen], ranked.ranks[chosen]
    starts = np.flatnonzero(np.diff(user, prepend=-1))
    counts = np.diff(starts, append=len(user))
    position = np.arange(len(user)) - np.repeat(starts, counts) + 1
    gains = 1 / np.log2(np.arange(1, counts.max() + 1) + 1)

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values.astype(np.float64), starts)

    results = {"auc": float((total(ranked.below[chosen]) / counts).mean())}
    for k in cutoffs:
        is_hit = ranks <= k
        hits, ideal = total(is_hit), np.minimum(counts, k)
        per_user = {
            "recall": hits / counts,
            "ndcg": total(is_hit / np.log2(ranks + 1)) / np.cumsum(gains)[ideal - 1],
            "hit_rate": hits > 0,
            "precision": hits / k,
            "map": total(is_hit * position / ranks) / ideal,
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

    Args:
        ranked: The recommendations.
        cutoffs: The k of the metrics.
        grouping: The group of each answer and of each triple of ``listed``: (A + U * k,).

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
            stats |= _means(ranked, cutoffs, chosen)
        results.append({"group": label, "recommendation": stats})
    total = recommendation_metrics(ranked, cutoffs)
    return {"about": grouping.about, "total": total, "groups": results}


def recommendation_table(results: dict[str, Any]) -> str:
    """Return the metrics as a fixed-width text table, one line per k, and the AUC."""
    stats = results["recommendation"]
    cutoffs = [name.partition("@")[2] for name in stats if name.startswith("recall@")]
    lines = [
        f"{ranked_among(results)}: {stats['users']:,} users with {stats['answers']:,} answers",
        f"{'k':>5}" + "".join(f"{name:>11}" for name in _COLUMNS),
        "-" * (5 + 11 * len(_COLUMNS)),
    ]
    for k in cutoffs:
        lines.append(f"{k:>5}" + "".join(f"{stats[f'{name}@{k}']:>11.4f}" for name in _COLUMNS))
    return "\n".join([*lines, f"AUC {stats['auc']:.4f}"])
