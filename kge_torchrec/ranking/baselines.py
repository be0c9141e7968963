"""Baselines that know nothing of embeddings: how often an answer is in train, and item-kNN.

The engine ranks them as it ranks the model: among the same candidates, with the same filter and the
same rule for ties.

Shapes: T triples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kge_torchrec.models.scorers.base import SIDES
from kge_torchrec.ranking.candidates import Frequencies
from kge_torchrec.ranking.fixed import MISSING, FixedLists
from kge_torchrec.ranking.ranks import Ranks
from kge_torchrec.ranking.search import columns

FREQUENT, POPULAR, KNN = "most frequent", "most popular", "item-kNN"
TITLES = {POPULAR: "the most popular unseen items", KNN: "item-kNN"}
LISTS = 512  # fixed lists at once


def frequent_among_lists(frequencies: Frequencies, triples: np.ndarray, lists: FixedLists) -> Ranks:
    """Rank triples (T, 3) by ``FrequentScores`` among fixed lists, as ``rank_among_lists`` does."""
    ranks = Ranks({}, {})
    for side in SIDES:
        pessimistic, optimistic = np.empty((2, len(triples)), np.int64)
        own = frequencies.of(side, triples[:, 1], triples[:, columns(side)[1]])
        for first in range(0, len(triples), LISTS):
            part = slice(first, first + LISTS)
            ids = lists.of(side, triples[part])
            relations = np.broadcast_to(triples[part, 1:2], ids.shape)
            counts = frequencies.of(side, relations.ravel(), np.maximum(ids, 0).ravel())
            counts = np.where(ids == MISSING, -1, counts.reshape(ids.shape))
            optimistic[part] = 1 + (counts > own[part, None]).sum(1)
            pessimistic[part] = 1 + (counts >= own[part, None]).sum(1)
        ranks.optimistic[side], ranks.pessimistic[side] = optimistic, pessimistic
    return ranks


def unbeaten(results: dict[str, Any]) -> list[str]:
    """Return a sentence for each kind of results in which a baseline is as good as the model."""
    sentences = []
    if "baselines" in results:
        own, other = (
            x["both"]["realistic"]["mrr"] for x in (results, results["baselines"][FREQUENT])
        )
        if other >= own:
            sentences.append(
                "The model does not beat the most frequent heads and tails of each relation: MRR "
                f"{own:.4f} against {other:.4f}."
            )
    stats = results.get("recommendation", {})
    names = [name for name in stats if name.startswith(("recall@", "ndcg@"))]
    for baseline, values in results.get("recommendation_baselines", {}).items():
        lost = [name for name in names if values is not None and values[name] >= stats[name]]
        if lost:
            shown = ", ".join(f"{x} {stats[x]:.4f} against {values[x]:.4f}" for x in lost[-2:])
            sentences.append(f"The model does not beat {TITLES[baseline]}: {shown}.")
    return sentences
