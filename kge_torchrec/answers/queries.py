"""The best answers to triples with one missing part, new links of a relation, nearest entities.

Shapes: B queries, k answers per query, N entities, R relations, D elements per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import at_least, one_of
from kge_torchrec.data.sort import chunks
from kge_torchrec.data.store.filter_index import Answers, FilterIndex, Ranges
from kge_torchrec.kernels.comparisons import distance
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.ranking.blocks import ModelScores, Queries, score_block, scoring
from kge_torchrec.ranking.candidates import Candidates
from kge_torchrec.ranking.search import columns, top_k
from kge_torchrec.trained_model import Label, TrainedModel

Part = Literal["head", "relation", "tail"]
PARTS: tuple[Part, ...] = ("head", "relation", "tail")
FEW = 10  # the default number of answers
RELATIONS = 256  # relations per block of scores of an entity pair
HEADS = 512  # heads per batch of new links, at most
LINKS = 1 << 24  # links per batch, at most


@dataclass(frozen=True)
class Prediction:
    """One answer to a query."""

    rank: int  # from 1
    label: str
    score: float
    known: str | None = None  # the split that holds the completed triple, if any
    probability: float | None = None  # None without a calibration


@dataclass(frozen=True)
class Link:
    """A triple that the data does not hold."""

    rank: int  # from 1
    head: str
    relation: str
    tail: str
    score: float
    probability: float | None = None  # None without a calibration


@dataclass(frozen=True)
class Neighbour:
    """An entity near another entity."""

    rank: int  # from 1
    label: str
    score: float  # larger is nearer


@dataclass(frozen=True)
class Choice:
    """The answers to list.

    Raises:
        ConfigError: ``k`` is below 1.
    """

    k: int = FEW  # the number of answers per query
    exclude: FilterIndex | None = None  # known answers to leave out
    only: Candidates | None = None  # the entities that may be answers; None: all
    left_out: np.ndarray | None = None  # (M,) int64, entities that are no answers
    itself: bool = True  # whether the known entity of a query may be an answer
    novelty: float = 0.0  # see ``TrainedModel.best``

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)


def missing_part(query: Sequence[Label | None]) -> Part:
    """Return the part of (head, relation, tail) that is None.

    Raises:
        ConfigError: Not exactly one part is None.
    """
    missing = [part for part, name in zip(PARTS, query, strict=True) if name is None]
    if len(missing) != 1:
        raise ConfigError(
            "predict takes two of head, relation and tail and finds the third, got "
            f"{3 - len(missing)} of them"
        )
    return missing[0]


class Answered(NamedTuple):
    """The M answers to some queries, those of a query best first."""

    query: np.ndarray  # (M,) int64, the place of the query
    rank: np.ndarray  # (M,) int64, from 1
    triples: np.ndarray  # (M, 3) int64, the completed queries
    scores: np.ndarray  # (M,) float32
    known: np.ndarray  # (M,) the split that holds the triple, or None


def answered(model: TrainedModel, missing: Part, queries: np.ndarray, choice: Choice) -> Answered:
    """Return the answers of ``best`` to queries (B, 3), with their splits. Collective."""
    scores, ids = (found.numpy() for found in best(model, missing, queries, choice))
    query, column = (ids >= 0).nonzero()
    triples = queries[query]
    triples[:, PARTS.index(missing)] = ids[query, column]
    known = splits(model, missing, queries, ids)[query, column]
    return Answered(query, column + 1, triples, scores[query, column], known)


def predictions(
    model: TrainedModel, missing: Part, queries: np.ndarray, choice: Choice
) -> list[list[Prediction]]:
    """Return the answers to queries (B, 3) with labels and probabilities. Collective."""
    found = answered(model, missing, queries, choice)
    vocabulary = model.relation_labels if missing == "relation" else model.entity_labels
    values = zip(
        found.rank.tolist(),
        vocabulary.labels(found.triples[:, PARTS.index(missing)]),
        found.scores.tolist(),
        found.known.tolist(),
        model.probabilities(found.scores, missing, found.triples[:, 1]),
        strict=True,
    )
    answers: list[list[Prediction]] = [[] for _ in queries]
    for number, answer in zip(found.query.tolist(), values, strict=True):
        answers[number].append(Prediction(*answer))
    return answers


def best(
    model: TrainedModel, missing: Part, queries: np.ndarray, choice: Choice
) -> tuple[Tensor, Tensor]:
    """Return the best answers to queries that miss the same part. Collective.

    Equal scores come in order of id, and NaN counts as -inf. Relations are scored as tail queries.
    If every entity has one type, answers have a type that the relation has on that side.

    In queries (B, 3) the id of the missing part counts for nothing.

    Returns:
        Scores (B, k) float32, best first, and ids (B, k) int64, with fewer columns if there are
        fewer candidates. Missing answers have the id -1 and are the last ones of a query.

    Raises:
        DataError: An entity is of a type that the relation does not have on that side.
    """
    if missing == "relation":
        return _best_relations(model, queries, choice)
    only = choice.only
    if model.ends is not None:
        model.ends.check(missing, queries)
        only = model.ends if only is None else only
    anchor, answer = columns(missing)
    anchors, relations = queries[:, anchor], queries[:, 1]
    left_out = []
    if choice.left_out is not None:  # the same entities for every query
        ids = np.unique(choice.left_out)
        ends = np.zeros(len(queries), np.int64), np.full(len(queries), len(ids))
        left_out.append(Answers(len(queries), [Ranges(ids, *ends)]))
    if not choice.itself:
        left_out.append(Answers.single(anchors))
    if choice.exclude is not None:
        left_out.append(choice.exclude.answers(missing, anchors, relations))
    asked = Queries(torch.from_numpy(anchors), torch.from_numpy(relations), missing, only)
    exclude = Answers.merged(left_out) if left_out else None
    scores, found = model.best(asked, choice.k, exclude, choice.novelty)
    if choice.novelty:  # it changes the order, and the scores stay those of the model
        triples = torch.from_numpy(queries).repeat_interleave(found.shape[1], 0)
        triples[:, answer] = found.flatten().clamp(min=0)
        scores = model.scores(triples, missing).view(found.shape).masked_fill(found < 0, -torch.inf)
    return scores, found


def _best_relations(
    model: TrainedModel, queries: np.ndarray, choice: Choice
) -> tuple[Tensor, Tensor]:
    """Return the best relations of (h, ?, t); their scores are bit for bit ``model.scores``."""
    device, scorer = model.shard.device, model.scorer
    every = torch.arange(model.num_relations, device=device).split(RELATIONS)
    scores = torch.empty(len(queries), model.num_relations)
    left_out = np.zeros(scores.shape, bool)
    for row, (head, _, tail) in enumerate(queries.tolist()):
        ends = model.shard.fetch(torch.tensor([head, tail], device=device))
        with scoring(scorer):
            blocks = [
                score_block(scorer, ends[:1].expand(len(some), -1), some, ends[1:], "tail")
                for some in every
            ]
        scores[row] = torch.cat(blocks)[:, 0]
        if choice.exclude is not None:
            left_out[row, choice.exclude.relations_between(head, tail)] = True
    scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # The order is stable: ties stay in order of id.
    order = np.lexsort((-scores.numpy(), left_out), axis=1)[:, : choice.k]
    ids = np.where(np.take_along_axis(left_out, order, 1), -1, order)
    return scores.gather(1, torch.from_numpy(order)), torch.from_numpy(ids)


def splits(model: TrainedModel, missing: Part, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the split that holds each answer (B, k) to the queries (B, 3): (B, k) of str or None.

    An answer in several splits gets train before valid before test; a fact of a new entity gets
    "facts". An unknown answer gets None.
    """
    names = np.full(ids.shape, None, object)
    for split, index in reversed(model.known_by_split().items()):
        names[are_known(index, missing, queries, ids)] = split
    return names


def are_known(
    index: FilterIndex, missing: Part, queries: np.ndarray, ids: np.ndarray
) -> np.ndarray:
    """Return whether the index holds the queries (B, 3) completed by ids (B, k): (B, k) bool."""
    if missing == "relation":
        known = [index.relations_between(head, tail) for head, _, tail in queries.tolist()]
        return np.stack([np.isin(row, some) for row, some in zip(ids, known, strict=True)])
    return index.contains(missing, queries[:, columns(missing)[0]], queries[:, 1], ids)


def new_links(
    model: TrainedModel, relation: Label, k: int, candidates: str, loops: bool
) -> list[Link]:
    """Return the best triples of a relation that no split holds. Collective.

    Heads come in batches; the k best links are among the k best of each head. All pairs of
    candidates are scored as tail queries. Equal scores come in order of head, then tail; scores of
    NaN and minus infinity are left out.
    """
    at_least("k", k, 1)
    one_of("candidates", candidates, ("all", "seen"))
    known = model.store.filter_index()
    number = int(model.relation_ids(relation))
    only = model.candidates("seen") if candidates == "seen" else model.ends
    heads = np.arange(model.num_entities)
    if only is not None:
        some = [only.contain("head", np.full(len(x), number), x) for x in chunks(heads)]
        heads = heads[np.concatenate(some)]
    # The k best so far, best first; a pair is head * N + tail.
    scores, pairs = np.empty(0, np.float32), np.empty(0, np.int64)
    size = max(1, min(HEADS, LINKS // min(k, model.num_entities)))
    with model.bar(len(heads), "pairs of all heads", "head") as bar:
        for batch in torch.from_numpy(heads).split(size):
            queries = Queries(batch, torch.full_like(batch, number), "tail", only)
            exclude = known.answers("tail", batch.numpy(), queries.relations.numpy())
            if not loops:
                exclude = Answers.merged([exclude, Answers.single(batch.numpy())])
            found, tails = (x.numpy() for x in model.best(queries, k, exclude))
            row, column = (found > (scores[-1] if len(scores) == k else -np.inf)).nonzero()
            scores = np.append(scores, found[row, column])
            pairs = np.append(pairs, batch.numpy()[row] * model.num_entities + tails[row, column])
            order = np.lexsort((pairs, -scores))[:k]
            scores, pairs = scores[order], pairs[order]
            bar.update(len(batch))
    links = zip(
        model.entity_labels.labels(pairs // model.num_entities),
        model.relation_labels.labels([number] * len(pairs)),
        model.entity_labels.labels(pairs % model.num_entities),
        scores.tolist(),
        model.probabilities(scores, "tail", np.full(len(scores), number)),
        strict=True,
    )
    return [Link(rank, *link) for rank, link in enumerate(links, 1)]


MEANINGS = {
    "cosine": "cosine of the angle between the rows",
    "euclidean": "minus the Euclidean distance of the rows",
    "manhattan": "minus the Manhattan distance of the rows",
    "moduli": "minus the sum of the moduli of the differences of complex numbers",
}


def metric_of(scorer: Scorer) -> str:
    """Return the key of ``MEANINGS`` that fits a scorer: its distance, or else the cosine.

    The norm of a row reflects how often an entity is an answer, not what it means.
    """
    if not scorer.is_distance:
        return "cosine"
    kind = getattr(scorer.comparison, "kind", "euclidean").removeprefix("scaled_")
    return kind if kind in MEANINGS else "euclidean"


class EntitySimilarity(nn.Module):
    """A similarity of entities with the interface of a scorer, so ``top_k`` can search with it."""

    def __init__(self, scorer: Scorer):
        super().__init__()
        self.scorer, self.metric = scorer, metric_of(scorer)

    def points(self, rows: Tensor) -> Tensor:
        """Return entity rows as the formula uses them, without biases; of length 1 for cosines."""
        rows = self.scorer.vectors(rows.float())
        return nn.functional.normalize(rows, dim=-1) if self.metric == "cosine" else rows

    def encode(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        """Return the points of anchors, whatever the relation and the side."""
        return self.points(anchor)

    def matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        """Compare points with rows, as ``Scorer.matrix``: (1, b, D), (1, K, E) -> (1, b, K)."""
        points = self.points(rows)
        if self.metric == "cosine":
            return torch.matmul(query, points.transpose(-1, -2))
        return -distance(self.metric, query, points)  # type: ignore[arg-type]


def nearest(model: TrainedModel, entities: Tensor, k: int) -> list[list[Neighbour]]:
    """Return the k nearest entities to each of the ids (B,), nearest first. Collective.

    An entity is not its own neighbor.
    """
    at_least("k", k, 1)
    similarity, itself = EntitySimilarity(model.scorer), Answers.single(entities.numpy())
    queries, k = Queries(entities, torch.zeros_like(entities), "tail"), min(k, model.num_entities)
    found = top_k(ModelScores(similarity, model.shard), queries, k, itself)  # type: ignore[arg-type]
    results = []
    for scores, ids in zip(*(part.cpu() for part in found), strict=True):
        labels = model.entity_labels.labels(ids[ids >= 0].numpy())
        pairs = zip(labels, scores[ids >= 0].tolist(), strict=True)
        results.append([Neighbour(rank, *pair) for rank, pair in enumerate(pairs, 1)])
    return results
