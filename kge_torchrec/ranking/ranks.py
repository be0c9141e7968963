"""Filtered ranks of true answers, and the metrics of link prediction computed from them.

Shapes: T triples, N entities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config.training import cutoff_of
from kge_torchrec.data.store.filter_index import FilterIndex
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.ranking.blocks import Scores
from kge_torchrec.ranking.search import ALL_ENTITIES, RankOptions, compare

PARTS: tuple[Side | Literal["both"], ...] = (*SIDES, "both")
KINDS = ("optimistic", "realistic", "pessimistic")
HITS = (1, 3, 10)


@dataclass(frozen=True)
class Ranks:
    """The rank of each true answer by side, from 1; each array is (T,) int64.

    Among candidates with equal scores, the true answer comes first in optimistic ranks and last in
    pessimistic ranks.

    Attributes:
        optimistic: Optimistic ranks by side.
        pessimistic: Pessimistic ranks by side.
        candidates: A description of other candidates than all entities, see ``metrics``.
        outside: Per side (T,) bool: the true answers that are not candidates. They rank last.
    """

    optimistic: dict[Side, np.ndarray]
    pessimistic: dict[Side, np.ndarray]
    candidates: dict[str, Any] = field(default_factory=dict)
    outside: dict[Side, np.ndarray] = field(default_factory=dict)

    def values(self, side: Side | Literal["both"], kind: str) -> np.ndarray:
        """Return the ranks of one side (T,) float64, or of both in one array.

        A realistic rank is the mean of the optimistic and the pessimistic rank.
        """
        if side == "both":
            return np.concatenate([self.values(side, kind) for side in SIDES])
        if kind == "realistic":
            return (self.optimistic[side] + self.pessimistic[side]) / 2
        return getattr(self, kind)[side].astype(np.float64)


def rank_triples(
    scores: Scores,
    triples: Tensor | np.ndarray,
    known: FilterIndex | None,
    options: RankOptions = ALL_ENTITIES,
) -> Ranks:
    """Rank the true head and tail of every triple among all N entities. Collective.

    A NaN counts against the model: a candidate with NaN ranks before the true answer, and a true
    answer with NaN gets the last rank, N. So does one that is not a candidate.

    Args:
        scores: The scores.
        triples: (T, 3) int64 head, relation, tail; the same on every rank.
        known: Triples to remove from the candidates, except the true one. None ranks unfiltered.
        options: The candidates, and the pieces of the computation.

    Raises:
        ValueError: ``triples`` has another shape.
        IndexError: An entity id is outside [0, N).
    """
    triples = torch.as_tensor(triples, dtype=torch.int64).numpy()
    if triples.ndim != 2 or triples.shape[1] != 3:
        raise ValueError(f"triples must have shape (T, 3), not {triples.shape}")
    ranks, outside = Ranks({}, {}), {}
    for side in SIDES:
        counts = compare(scores, triples, side, known, options)
        is_last = ~(counts.has_score & counts.is_inside)
        optimistic = np.where(is_last, scores.shard.num_entities, 1 + counts.better)
        place = np.argsort(counts.order)
        ranks.optimistic[side] = optimistic[place]
        ranks.pessimistic[side] = (optimistic + np.where(is_last, 0, counts.equal))[place]
        if options.candidates is not None:
            ranks.outside[side] = ~counts.is_inside[place]
            outside[side] = int(ranks.outside[side].sum())
    if options.candidates is not None:
        restricted_to = options.candidates.label
        ranks.candidates.update(restricted_to=restricted_to, answers_outside=outside)
    return ranks


def metrics(ranks: Ranks) -> dict[str, Any]:
    """Return the metrics of a ranking.

    "both" covers the ranks of both sides. A realistic rank of 1.5 is not a hit at 1.

    Returns:
        {"head" | "tail" | "both": {kind: {"mrr", "mr", "hits@1", "hits@3", "hits@10"}}}. With
        other candidates than all entities, the first entry is "candidates": {"restricted_to":
        description, ...}. Restricted ones have "answers_outside": {side: number of true answers
        that are not candidates}, fixed lists have "kind" ("fixed") and "per_query" (the fewest and
        the most candidates).

    Raises:
        ValueError: There are no ranks.
    """
    if not len(ranks.optimistic["head"]):
        raise ValueError("no metrics without ranks: the set of triples is empty")
    results: dict[str, Any] = {"candidates": ranks.candidates} if ranks.candidates else {}
    for side in PARTS:
        results[side] = {kind: _summary(ranks.values(side, kind)) for kind in KINDS}
    return results


def value_of(results: dict[str, Any], metric: str) -> float:
    """Return the value of ``evaluation.metric`` in the results of a validation."""
    if cutoff_of(metric) is not None:
        return results["recommendation"][metric]
    return results["both"]["realistic"][metric]


def ranked_among(results: dict[str, Any]) -> str:
    """Describe the candidates of a ranking, for the head of a table or the end of a line."""
    restriction = results.get("candidates")
    what = "filtered ranks" if "both" in results else "recommendations"
    if restriction is None:
        return f"{what} among all entities"
    kind = restriction.get("kind", "restricted")
    is_fixed = kind == "fixed"
    what = f"un{what}" if is_fixed else what
    text = (
        f"{kind.upper()} candidates, not comparable with ranks among all entities: {what} "
        f"among {restriction['restricted_to']}"
    )
    if is_fixed:
        fewest, most = restriction["per_query"]
        return text if fewest == most else f"{text}; {fewest:,} to {most:,} per query"
    outside = ", ".join(f"{n:,} {side}s" for side, n in restriction["answers_outside"].items())
    return f"{text}; true answers outside, ranked last: {outside}"


def _summary(ranks: np.ndarray) -> dict[str, float]:
    means = {"mrr": float((1 / ranks).mean()), "mr": float(ranks.mean())}
    return means | {f"hits@{k}": float((ranks <= k).mean()) for k in HITS}
