"""Baselines that know nothing of embeddings: how often an answer is in train, and item-kNN.

    most frequent  score of an entity: the training triples of the relation with it on that side
    item-kNN       score of an item: the sum of its similarities to the items that the user has in
                   train, of those among its ``NEIGHBORS`` most similar ones; the similarity is the
                   cosine of the items' sets of users (the values of RecBole's ItemKNN)

They are ranked among the same candidates, with the same filter and the same rule for ties as the
model. Few entities have a score above 0, so nothing is scored densely: an answer's rank follows
from the sorted scores of the relation or user and those that are filtered. Everything here runs on
one process.

Shapes: A answers, U queries, N entities, R relations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from kge_torchrec.data import OTHER
from kge_torchrec.data.sort import pointers, value_counts
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import Answers, FilterIndex, Ranges, keys_of, relations_of
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.ranking.candidates import Candidates
from kge_torchrec.ranking.fixed import MISSING, FixedLists
from kge_torchrec.ranking.ranks import Ranks, metrics, ranks_of
from kge_torchrec.ranking.recommendation import means, recommendations
from kge_torchrec.ranking.search import Counts, by_query, columns

FREQUENT, POPULAR, KNN = "most frequent", "most popular", "item-kNN"
TITLES = {POPULAR: "the most popular unseen items", KNN: "item-kNN"}
NEIGHBORS = 100  # similar items per item, RecBole's default
PAIRS = 2 * 10**10  # pairs of items of one user that item-kNN visits at most: half a minute
ITEMS = 500_000  # items of item-kNN at most: 800 MB
FILTERED = 1 << 20  # filtered answers at once
LISTS = 512  # fixed lists at once


class Task(NamedTuple):
    """What a ranking is computed among; the same for the model and the baselines.

    Args:
        store: The data.
        side: The side of the answers.
        known: Triples whose answers do not compete. None: there are none.
        candidates: The entities that compete; None: all.
        sizes: (R,) int64, the candidates of each relation on that side.
    """

    store: TripleStore
    side: Side
    known: FilterIndex | None
    candidates: Candidates | None
    sizes: np.ndarray


def candidate_counts(
    candidates: Candidates | None,
    side: Side,
    triples: np.ndarray,
    store: TripleStore,
    shard: EntityShard,
) -> np.ndarray:
    """Return the candidates of each relation of triples on a side: (R,) int64. Collective."""
    if candidates is None:
        return np.full(store.num_relations, store.num_entities)
    sizes = torch.zeros(store.num_relations, dtype=torch.int64, device=shard.device)
    for relation in np.unique(triples[:, 1]).tolist():
        sizes[relation] = int(candidates.mask(side, relation, *shard.row_range).sum())
    return reduced(sizes).cpu().numpy()


class _Batch(NamedTuple):
    """Some queries, and what is filtered or is an answer of a list: distinct candidates."""

    queries: slice
    answers: slice
    anchors: np.ndarray  # (U,)
    relations: np.ndarray  # (U,)
    query: np.ndarray  # (X,) int64, ascending, of the entities that do not compete
    entity: np.ndarray  # (X,)
    pool: np.ndarray  # (U,) int64, the entities that compete


def frequencies(store: TripleStore, side: Side, relations: np.ndarray, entities: np.ndarray) -> Any:
    """Return in how many training triples of relations (B,) entities (B,) are on a side: (B,)."""
    return store.filter_index(("train",)).answers(OTHER[side], entities, relations).counts


def most_frequent(task: Task, triples: np.ndarray, lists: bool) -> Counts:
    """Compare answers with the other candidates by how often they are in train.

    Args:
        task: The candidates and the filter.
        triples: (A, 3) int64.
        lists: Whether the answers are of lists, where they do not compete with each other.
    """
    index = task.store.side_index("train", OTHER[task.side])
    span = int(np.diff(index.starts).max(initial=0)) + 1  # counts are below
    parts = (slice(at, at + FILTERED + 1) for at in range(0, len(index.queries), FILTERED))
    keys, amounts = value_counts(
        relations_of(index.queries[part.start : part.stop - 1]) * span + np.diff(index.starts[part])
        for part in parts
    )
    totals = np.append(0, np.cumsum(amounts))

    def above(values: np.ndarray, bounds: np.ndarray, side: Any) -> np.ndarray:
        return totals[np.searchsorted(keys, bounds)] - totals[np.searchsorted(keys, values, side)]

    def compared(batch: _Batch, query: np.ndarray, answers: np.ndarray) -> tuple[Any, Any]:
        relation = batch.relations[query]
        counts = frequencies(task.store, task.side, relation, answers)
        bounds = (relation + 1) * span
        better = above(relation * span + counts, bounds, "right")
        not_worse = above(relation * span + counts, bounds, "left")
        not_worse[counts == 0] = task.sizes[relation[counts == 0]]
        own = frequencies(task.store, task.side, batch.relations[batch.query], batch.entity)
        own = np.sort(batch.query * span + own)
        ends = np.searchsorted(own, (query + 1) * span)
        better -= ends - np.searchsorted(own, query * span + counts, "right")
        not_worse -= ends - np.searchsorted(own, query * span + counts)
        return better, not_worse - better

    return _counted(task, triples, lists, compared)


def _counted(
    task: Task,
    triples: np.ndarray,
    lists: bool,
    compared: Callable[[_Batch, np.ndarray, np.ndarray], tuple[Any, Any]],
) -> Counts:
    """Return counts as ``search.compare`` does.

    ``compared`` returns how many of the competing candidates are better than the answers (A,) to
    queries (A,) of a batch, and how many are equal.
    """
    _, answer = columns(task.side)
    order, starts = by_query(triples, task.side)
    triples = triples[order]
    better, equal, pool = np.zeros((3, len(triples)), np.int64)
    is_inside, is_known = np.ones(len(triples), bool), np.zeros(len(triples), bool)
    for batch in _batches(task, triples, starts, lists):
        anchors, relations = batch.anchors, batch.relations
        own = triples[batch.answers]
        query = np.repeat(
            np.arange(len(anchors)),
            np.diff(np.append(starts, len(triples))[batch.queries.start : batch.queries.stop + 1]),
        )
        if task.known is not None:
            is_known[batch.answers] = task.known.contains(
                task.side, anchors[query], relations[query], own[:, answer][:, None]
            )[:, 0]
        if task.candidates is not None:
            is_inside[batch.answers] = task.candidates.contain(
                task.side, relations[query], own[:, answer]
            )
        pool[batch.answers] = batch.pool[query]
        better[batch.answers], equal[batch.answers] = compared(batch, query, own[:, answer])
    if not lists:
        equal -= is_inside & ~is_known  # the answer itself
    has_score = np.ones(len(triples), bool)
    return Counts(order, starts, better, equal, pool, has_score, is_inside, is_known,
                  np.empty((len(starts), 0), np.int64))  # fmt: skip


def _batches(task: Task, triples: np.ndarray, starts: np.ndarray, lists: bool) -> Iterator[_Batch]:
    """Yield the queries in batches of about ``FILTERED`` entities that do not compete."""
    anchor, answer = columns(task.side)
    anchors, relations = triples[starts][:, [anchor, 1]].T.copy()
    bounds = np.append(starts, len(triples))
    sizes = np.diff(bounds) * lists
    if task.known is not None:
        sizes = sizes + task.known.answers(task.side, anchors, relations).counts
    number = np.cumsum(sizes) // FILTERED
    cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(starts)]
    entities = task.store.num_entities
    for low, high in pairwise(cuts):
        parts = [Answers(high - low, [])]
        if task.known is not None:
            parts.append(task.known.answers(task.side, anchors[low:high], relations[low:high]))
        if lists:
            its_own = triples[bounds[low] : bounds[high], answer]
            ends = bounds[low : high + 1] - bounds[low]
            parts.append(Answers(high - low, [Ranges(its_own, ends[:-1], ends[1:])]))
        query, entity = Answers.merged(parts).all()
        query, entity = np.divmod(np.unique(query * entities + entity), entities)
        if task.candidates is not None:
            kept = task.candidates.contain(task.side, relations[low:high][query], entity)
            query, entity = query[kept], entity[kept]
        pool = task.sizes[relations[low:high]] - np.bincount(query, minlength=high - low)
        yield _Batch(slice(low, high), slice(bounds[low], bounds[high]), anchors[low:high],
                     relations[low:high], query, entity, pool)  # fmt: skip


def item_knn(task: Task, triples: np.ndarray) -> Counts | None:
    """Compare the answers of lists with the other candidates by item-kNN.

    Returns:
        The counts; None if it would take longer than ``PAIRS`` or ``ITEMS`` allow.
    """
    from kge_torchrec.ranking.neighbors import compare_sums, similar_items  # compiled

    index = task.store.side_index("train", task.side)
    users = np.flatnonzero(np.isin(relations_of(index.queries), triples[:, 1]))
    sizes = np.diff(index.starts)[users]
    if (sizes.astype(np.float64) ** 2).sum() > PAIRS:
        return None
    user, entity = Ranges(index.answers, index.starts[users], index.starts[users + 1]).gathered()
    user_keys = index.queries[users]
    # An entity is an item of each relation on its own.
    item_keys, items = np.unique(
        keys_of(entity, relations_of(user_keys)[user]), return_inverse=True
    )
    if len(item_keys) > ITEMS:
        return None
    items_at, users_at = pointers(user, len(users)), pointers(items, len(item_keys))
    ids, cosines = similar_items(
        items_at, items, users_at, user[np.argsort(items, kind="stable")], NEIGHBORS
    )
    # Turn the lists around: the items that each item is similar to.
    item, column = np.nonzero(ids >= 0)
    order = np.argsort(ids[item, column], kind="stable")
    lists_at = pointers(ids[item, column], len(item_keys))
    listed, cosines = item[order], cosines[item, column][order]

    def numbers(keys: np.ndarray, entities: np.ndarray, relations: np.ndarray) -> np.ndarray:
        wanted = keys_of(entities, relations)
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[place] == wanted, place, -1) if len(keys) else wanted * 0 - 1

    def compared(batch: _Batch, query: np.ndarray, answers: np.ndarray) -> tuple[Any, Any]:
        better, equal = np.zeros((2, len(answers)), np.int64)
        compare_sums(
            numbers(user_keys, batch.anchors, batch.relations), items_at, items, lists_at, listed,
            cosines, pointers(batch.query, len(batch.anchors)),
            numbers(item_keys, batch.entity, batch.relations[batch.query]),
            pointers(query, len(batch.anchors)),
            numbers(item_keys, answers, batch.relations[query]), batch.pool, better, equal,
        )  # fmt: skip
        return better, equal

    return _counted(task, triples, True, compared)


def rank_baselines(tasks: dict[Side, Task], triples: np.ndarray) -> dict[str, Any]:
    """Return the metrics of ranks by frequency, by the name of the baseline."""
    counts = {side: most_frequent(task, triples, False) for side, task in tasks.items()}
    any_task = next(iter(tasks.values()))
    ranks = ranks_of(counts, any_task.store.num_entities, any_task.candidates)
    return {FREQUENT: metrics(ranks)}


def list_baselines(task: Task, triples: np.ndarray, cutoffs: Sequence[int]) -> dict[str, Any]:
    """Return the metrics of the lists of each baseline; None if item-kNN would take too long."""
    results: dict[str, Any] = {}
    for name, counts in (
        (POPULAR, most_frequent(task, triples, True)), (KNN, item_knn(task, triples)),
    ):  # fmt: skip
        results[name] = None
        if counts is not None:
            ranked = recommendations(counts, triples, task.side, 0, task.candidates)
            results[name] = means(ranked, cutoffs, np.ones(len(triples), bool))
    return results


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


def frequent_among_lists(
    store: TripleStore, triples: np.ndarray, lists: FixedLists
) -> dict[str, Any]:
    """Return ``rank_baselines`` among fixed lists, ranked as by ``rank_among_lists``."""
    ranks = Ranks({}, {})
    for side in SIDES:
        pessimistic, optimistic = np.empty((2, len(triples)), np.int64)
        own = frequencies(store, side, triples[:, 1], triples[:, columns(side)[1]])
        for first in range(0, len(triples), LISTS):
            part = slice(first, first + LISTS)
            ids = lists.of(side, triples[part])
            relations = np.broadcast_to(triples[part, 1:2], ids.shape)
            counts = frequencies(store, side, relations.ravel(), np.maximum(ids, 0).ravel())
            counts = np.where(ids == MISSING, -1, counts.reshape(ids.shape))
            optimistic[part] = 1 + (counts > own[part, None]).sum(1)
            pessimistic[part] = 1 + (counts >= own[part, None]).sum(1)
        ranks.optimistic[side], ranks.pessimistic[side] = optimistic, pessimistic
    return {FREQUENT: metrics(ranks)}
