"""The best answers to a triple with one missing part: a head, a relation or a tail.

Shapes: B queries, k answers per query, M answers of all queries, N entities, R relations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import at_least
from kge_torchrec.data.store.filter_index import FEW as FEW_QUERIES
from kge_torchrec.data.store.filter_index import Answers, FilterIndex
from kge_torchrec.ranking.blocks import score_block, scoring
from kge_torchrec.ranking.candidates import Candidates
from kge_torchrec.ranking.search import Queries
from kge_torchrec.trained_model import Label, TrainedModel

Part = Literal["head", "relation", "tail"]
PARTS: tuple[Part, ...] = ("head", "relation", "tail")
RELATIONS = 256  # relations per block of scores of an entity pair
FEW = 10  # the default number of answers


@dataclass(frozen=True)
class Prediction:
    """One answer to a query."""

    rank: int  # from 1
    label: str
    score: float
    known: str | None = None  # the split that holds the completed triple, if any
    probability: float | None = None  # None without a calibration


class Query(NamedTuple):
    """A triple of labels or ids whose missing part is None."""

    head: Label | None
    relation: Label | None
    tail: Label | None

    @property
    def missing(self) -> Part:
        """The missing part.

        Raises:
            ConfigError: Not exactly one part is missing.
        """
        parts = [part for part, name in zip(PARTS, self, strict=True) if name is None]
        if len(parts) != 1:
            raise ConfigError(
                "predict takes two of head, relation and tail and finds the third, got "
                f"{3 - len(parts)} of them"
            )
        return parts[0]


@dataclass(frozen=True)
class Choice:
    """The choice of candidates to list as answers.

    Raises:
        ConfigError: ``k`` is below 1.
    """

    k: int = FEW  # the number of answers
    known: bool = True  # whether to list answers that the data already holds
    only: Candidates | None = None  # the entities that may be answers; None: all
    itself: bool = True  # whether the known entity of a query may be an answer

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)


class Results(NamedTuple):
    """M answers to B queries, grouped by query, each group best first."""

    query: np.ndarray  # (M,) int64, ascending: the index of the query in the batch
    ids: np.ndarray  # (M,) int64, entities or relations
    scores: np.ndarray  # (M,) float32

    @property
    def ranks(self) -> np.ndarray:
        """The rank of each answer among those of its query: (M,) int64, from 1."""
        return np.arange(1, len(self.query) + 1) - np.searchsorted(self.query, self.query)


def predict(model: TrainedModel, query: Query, choice: Choice) -> list[Prediction]:
    """Return the answers to one query, best first; see ``Answering.predict``. Collective.

    Equal scores come in order of id; NaN counts as -inf.
    """
    missing = query.missing
    for name, part in zip(PARTS, query, strict=True):
        if np.ndim(part):  # type: ignore[arg-type]
            raise ConfigError(
                f"{name} must be one label or id, got {part!r:.60}; answer_file takes many queries"
            )
    ids_of_part = model.entity_ids, model.relation_ids, model.entity_ids
    parts = zip(ids_of_part, query, strict=True)
    ids = torch.stack(
        [torch.tensor(0) if part is None else ids_of(part) for ids_of, part in parts]
    )[None]
    return predictions(model, missing, ids, choice)[0]


def predictions(
    model: TrainedModel, missing: Part, queries: Tensor, choice: Choice
) -> list[list[Prediction]]:
    """Return the answers that ``find`` finds, by query. Collective."""
    results = find(model, missing, queries, choice)
    vocabulary = model.relation_labels if missing == "relation" else model.entity_labels
    labels = vocabulary.labels(results.ids)
    known = splits(model, missing, queries.numpy(), results)
    probabilities = model.probabilities(results.scores, missing)
    columns = results.ranks.tolist(), labels, results.scores.tolist(), known, probabilities
    answers: list[list[Prediction]] = [[] for _ in queries]
    for query, *answer in zip(results.query.tolist(), *columns, strict=True):
        answers[query].append(Prediction(*answer))
    return answers


def find(model: TrainedModel, missing: Part, queries: Tensor, choice: Choice) -> Results:
    """Return the answers to queries (B, 3) that miss the same part, whose id counts for nothing.

    Memory holds one block of scores and the answers; see ``find_best``. Collective.
    """
    exclude = None if choice.known else model.known("leaving out known answers").filter_index()
    more = choice.k, exclude, choice.only, choice.itself
    scores, ids = find_best(model, missing, queries, *more)
    is_listed = ids >= 0
    query = is_listed.nonzero()[:, 0]
    return Results(query.numpy(), ids[is_listed].numpy(), scores[is_listed].numpy())


def find_best(
    model: TrainedModel,
    missing: Part,
    queries: Tensor,
    k: int,
    exclude: FilterIndex | None = None,
    only: Candidates | None = None,
    itself: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the k best answers of each query (B, 3) that are not in ``exclude``. Collective.

    Args:
        model: The model.
        missing: The part that the queries miss.
        queries: (B, 3) int64; the id of the missing part counts for nothing.
        k: The number of answers.
        exclude: Known answers to leave out.
        only: The entities that may be answers. None: all entities, or if every entity has one
            type, those of the types that the relation has on that side.
        itself: Whether the known entity of a query may be an answer.

    Returns:
        Scores (B, k) float32, best first, and ids (B, k) int64, with fewer columns if there are
        fewer candidates. Missing answers have the id -1.

    Raises:
        DataError: An entity is of a type that the relation does not have on that side.
    """
    if missing == "relation":
        scores, ids = _relations(model, queries, exclude)
        return scores[:, :k], ids[:, :k]
    if model.ends is not None:
        model.ends.check(missing, queries.numpy())
        only = model.ends if only is None else only
    anchors, relations = queries[:, 0 if missing == "tail" else 2], queries[:, 1]
    left_out = [] if itself else [Answers.single(anchors.numpy())]
    if exclude is not None:
        left_out.append(exclude.answers(missing, anchors.numpy(), relations.numpy()))
    asked = Queries(anchors, relations, missing, only)
    return model.best(asked, k, Answers.merged(left_out) if left_out else None)


def _relations(
    model: TrainedModel, queries: Tensor, exclude: FilterIndex | None
) -> tuple[Tensor, Tensor]:
    """Return all relations of (h, ?, t) in the format of ``find_best``, scored as tail queries."""
    scores = torch.stack([relation_scores(model, *ends) for ends in queries[:, ::2].tolist()])
    left_out = np.zeros(scores.shape, bool)
    if exclude is not None:
        for row, (head, _, tail) in zip(left_out, queries.tolist(), strict=True):
            row[exclude.relations_between(head, tail)] = True
    order = np.lexsort((-scores.numpy(), left_out), axis=1)  # stable: ties stay in order of id
    ids = np.where(np.take_along_axis(left_out, order, 1), -1, order)
    return scores.gather(1, torch.from_numpy(order)), torch.from_numpy(ids)


def relation_scores(model: TrainedModel, head: int, tail: int) -> Tensor:
    """Return the scores (R,) float32 of all relations between two entities. Collective.

    They are bit for bit those of ``model.scores``.
    """
    device = model.shard.device
    rows = model.shard.fetch(torch.tensor([head, tail], device=device))
    with scoring(model.scorer):
        parts = [
            score_block(model.scorer, rows[:1].expand(len(some), -1), some, rows[1:], "tail")[:, 0]
            for some in torch.arange(model.num_relations, device=device).split(RELATIONS)
        ]
    scores = torch.cat(parts).cpu()
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def splits(
    model: TrainedModel, missing: Part, queries: np.ndarray, results: Results
) -> list[str | None]:
    """Return the split that holds each of M answers to the queries (B, 3).

    An answer in several splits gets train before valid before test. An unknown answer gets None,
    and so does every answer of an export.
    """
    names = np.full(len(results.ids), None, object)
    if model.store is None:
        return names.tolist()
    for split in ("test", "valid", "train"):
        index = model.store.filter_index((split,))
        if missing != "relation" and len(queries) > FEW_QUERIES:
            pairs = queries[results.query], results.ids[:, None]
            names[are_known(index, missing, *pairs)[:, 0]] = split
            continue
        ends = np.searchsorted(results.query, np.arange(len(queries) + 1))
        for query, start, stop in zip(queries, ends[:-1], ends[1:], strict=True):
            known = are_known(index, missing, query[None], results.ids[None, start:stop])[0]
            names[start:stop][known] = split
    return names.tolist()


def are_known(
    index: FilterIndex, missing: Part, queries: np.ndarray, ids: np.ndarray
) -> np.ndarray:
    """Return whether the index holds the queries (B, 3) completed by ids (B, k): (B, k) bool."""
    if missing == "relation":
        known = [index.relations_between(head, tail) for head, _, tail in queries.tolist()]
        return np.stack([np.isin(row, some) for row, some in zip(ids, known, strict=True)])
    return index.contains(missing, queries[:, 0 if missing == "tail" else 2], queries[:, 1], ids)
