"""The answers that ``predict`` lists for the queries of a held-out split, labeled true or false.

A query is a triple of the split without its head, relation or tail. Its candidates are all
entities, or all relations, except the answers that other splits hold. The best candidates are
listed. A listed candidate is true if the split holds the completed triple.

Shapes: B queries per batch, k listed candidates per query, M listed candidates of all queries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kge_torchrec.answers.model import AnsweringModel
from kge_torchrec.answers.predictions import PARTS, Part, find_best
from kge_torchrec.data.readers import SPLITS
from kge_torchrec.data.store.filter_index import FilterIndex
from kge_torchrec.errors import DataError

QUERIES = 512  # queries per batch
RELATION_QUERIES = 1000  # a low limit: each entity pair is scored with all relations


class CandidateAnswers(NamedTuple):
    """The M listed candidates of distinct queries."""

    queries: int
    scores: np.ndarray  # (M,) float32
    labels: np.ndarray  # (M,) bool, True for true answers


def candidate_answers(
    model: AnsweringModel, split: str, asked: Part, top: int, limit: int, seed: int
) -> CandidateAnswers:
    """Return the best candidates of each query of a split. Collective.

    Args:
        model: The model, with its data.
        split: The held-out split.
        asked: The part that the queries miss.
        top: The number of candidates per query.
        limit: The number of queries; a split with more is sampled. Relation queries have the
            additional limit ``RELATION_QUERIES``.
        seed: The seed of the sample.

    Raises:
        DataError: The split has no triples.
    """
    store = model.known("calibrating")
    triples = np.array(store.split(split), np.int64)
    if not len(triples):
        raise DataError(f"{store.path} has no {split} triples")
    triples[:, PARTS.index(asked)] = 0
    queries = np.unique(triples, axis=0)
    limit = min(limit, RELATION_QUERIES) if asked == "relation" else limit
    if len(queries) > limit:
        chosen = np.random.default_rng(seed).choice(len(queries), limit, replace=False)
        queries = queries[np.sort(chosen)]
    own = store.filter_index((split,))
    others = store.filter_index([name for name in SPLITS if name != split])
    scores, labels = [], []
    with model.bar(len(queries), f"{split}: {asked}s", "query") as bar:
        for batch in np.array_split(queries, range(QUERIES, len(queries), QUERIES)):
            found, ids = find_best(model, asked, torch.from_numpy(batch), top, others)
            is_listed = ((ids >= 0) & found.isfinite()).numpy()
            scores.append(found.numpy()[is_listed])
            labels.append(_are_known(own, asked, batch, ids.numpy())[is_listed])
            bar.update(len(batch))
    return CandidateAnswers(len(queries), np.concatenate(scores), np.concatenate(labels))


def _are_known(index: FilterIndex, asked: Part, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return whether the index holds the queries (B, 3) completed by ids (B, k): (B, k) bool."""
    if asked == "relation":
        known = [index.relations_between(head, tail) for head, _, tail in queries.tolist()]
        return np.stack([np.isin(row, some) for row, some in zip(ids, known, strict=True)])
    return index.contains(asked, queries[:, 0 if asked == "tail" else 2], queries[:, 1], ids)
