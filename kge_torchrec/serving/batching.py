"""Batches queries: those that arrive during a pass wait and are answered together in the next one.

A pass over all entities costs nearly the same for 64 queries as for one. An idle server answers
at once and never waits for a batch to fill.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch

from kge_torchrec.answers.queries import (
    PARTS,
    Choice,
    Neighbour,
    Part,
    Prediction,
    known_answers,
    missing_part,
    nearest,
    predictions,
    recommended,
)
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.data.store.filter_index import anchors_of, relations_of
from kge_torchrec.errors import KGEError
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.ranking.candidates import Candidates, ListedCandidates, WithoutListed
from kge_torchrec.trained_model import Label, TrainedModel

log = logging.getLogger(__name__)
Name = tuple[str, Label]  # "entity" or "relation", and its label or id
Facts = tuple[tuple[str, str, str], ...]  # triples of labels, of entities that the model lacks
KIND_OF: dict[Part, str] = {"head": "entity", "relation": "relation", "tail": "entity"}


class Busy(KGEError):
    """Too many queries are waiting."""


class Unknown(KGEError):
    """A label or id that the model does not have.

    Attributes:
        kind: "entity" or "relation".
        name: The label or id.
    """

    def __init__(self, kind: str, name: Label):
        super().__init__(f"unknown {kind} {name!r}")
        self.kind, self.name = kind, name


@dataclass(frozen=True)
class Predict:
    """A query for the k best answers to a triple whose missing part is None."""

    query: tuple[Label | None, Label | None, Label | None]
    k: int
    known: bool
    facts: Facts = ()

    @property
    def labels(self) -> list[Name]:
        parts = zip(PARTS, self.query, strict=True)
        return [(KIND_OF[part], name) for part, name in parts if name is not None]


@dataclass(frozen=True)
class Recommend:
    """A query for the k best tails of each of some heads; see ``Answering.recommend``."""

    heads: tuple[Label, ...]
    relation: Label
    k: int
    exclude_known: bool = False
    candidates: str | tuple[Label, ...] = "seen"  # "seen", "all", or entities
    exclude: tuple[Label, ...] = ()  # entities that are not recommended
    facts: Facts = ()
    popular: bool = False  # what unknown heads get; otherwise they are errors

    @property
    def labels(self) -> list[Name]:
        listed = self.candidates if isinstance(self.candidates, tuple) else ()
        names = (*listed, *self.exclude, *(() if self.popular else self.heads))
        return [("relation", self.relation), *(("entity", name) for name in names)]


@dataclass(frozen=True)
class Recommended:
    """The answers to one head."""

    head: Label
    answers: list[Prediction]
    fallback: str | None = None  # "popular" if the model does not have the head


@dataclass(frozen=True)
class Score:
    """A query for the scores of triples."""

    triples: tuple[tuple[Label, Label, Label], ...]
    side: Side

    @property
    def labels(self) -> list[Name]:
        kinds = [KIND_OF[part] for part in PARTS]
        return [pair for triple in self.triples for pair in zip(kinds, triple, strict=True)]


@dataclass(frozen=True)
class Nearest:
    """A query for the k nearest entities to an entity."""

    entity: Label
    k: int

    @property
    def labels(self) -> list[Name]:
        return [("entity", self.entity)]


Question = Predict | Recommend | Score | Nearest
Waiting = tuple[Question, "asyncio.Future[Any]"]


class Answerer:
    """A thread that answers queries in batches of at most ``most``; ``room`` queries may wait.

    ``model`` may be replaced at any time: a batch that has begun finishes with the model before.
    """

    def __init__(self, model: TrainedModel, most: int = 64, room: int = 1024):
        self.model, self.most, self.room = model, most, room
        self.batches = self.answered = 0
        self.loaded = datetime.now(timezone.utc)
        self.problem: str | None = None  # why a newer model is not used
        self._waiting: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def replace(self, model: TrainedModel) -> None:
        """Answer with another model from the next batch on."""
        self.model, self.loaded, self.problem = model, datetime.now(timezone.utc), None

    async def ask(self, question: Question) -> Any:
        """Return the answer to a query: a list of predictions, scores or neighbors.

        Raises:
            Busy: Too many queries are waiting.
            Unknown: The model does not have a label or id.
            KGEError: The model cannot answer the query.
        """
        if self._waiting.qsize() >= self.room:
            raise Busy(f"{self.room} queries are waiting already; try again in a moment")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.put((question, future))
        return await future

    def close(self) -> None:
        """Answer the waiting queries, then end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch: list[Waiting] = [first]
            ends = False
            while len(batch) < self.most and not self._waiting.empty():
                following = self._waiting.get()
                ends = following is None
                if following is None:
                    break
                batch.append(following)
            self._answer(batch)
            if ends:
                return

    def _answer(self, batch: list[Waiting]) -> None:
        try:
            # The model may be replaced meanwhile; the batch is answered by one of them.
            results = answers(self.model, [question for question, _ in batch])
        except Exception as error:  # the error goes to the clients, and the thread continues
            results = [error] * len(batch)
        self.batches, self.answered = self.batches + 1, self.answered + len(batch)
        futures = [future for _, future in batch]
        try:
            futures[0].get_loop().call_soon_threadsafe(_deliver, futures, results)
        except RuntimeError:  # the event loop is closed, since the server ends
            log.info("%d answers came after the end of the server", len(futures))


def _deliver(futures: list[asyncio.Future[Any]], results: list[Any]) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():  # the client has disconnected
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def answers(model: TrainedModel, questions: Sequence[Question]) -> list[Any]:
    """Return the answer to each query, or its exception.

    An invalid query does not affect the other queries.
    """
    results: list[Any] = [None] * len(questions)
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, question in enumerate(questions):
        groups[_group(question)].append(place)
    ids = _Ids(model, questions)
    for places in groups.values():
        group = [questions[place] for place in places]
        try:
            found = _answered(model, group, ids)
        except Exception as error:  # must not end the thread
            if not isinstance(error, KGEError):
                log.exception("a batch of %d queries failed", len(group))
            found = [error] * len(group)
        for place, result in zip(places, found, strict=True):
            results[place] = result
    return results


def _answered(model: TrainedModel, group: Sequence[Question], ids: _Ids) -> list[Any]:
    """Return the answers to queries of one group; a query with an unknown name gets that error."""
    if facts := getattr(group[0], "facts", ()):
        from kge_torchrec.answers.fold_in import fold_in

        model = fold_in(model, facts)
        ids = _Ids(model, group)
    errors = [ids.unknown(question.labels) for question in group]
    good = [question for question, error in zip(group, errors, strict=True) if error is None]
    found = iter(_ANSWER_GROUP[type(group[0])](model, good, ids) if good else [])
    return [next(found) if error is None else error for error in errors]


class _Ids:
    """The ids of all names of a batch, looked up with one pass over each vocabulary."""

    def __init__(self, model: TrainedModel, questions: Iterable[Question]):
        self._counts = {"entity": model.num_entities, "relation": model.num_relations}
        self._ids: dict[str, dict[str, int]] = {"entity": {}, "relation": {}}
        for question in questions:
            heads = question.heads if isinstance(question, Recommend) else ()
            for kind, name in [*question.labels, *(("entity", head) for head in heads)]:
                if isinstance(name, str):
                    self._ids[kind][name] = -1
        for kind, labels in self._ids.items():
            if labels:
                found = vocabulary_of(model, kind).search(list(labels)).tolist()
                labels.update(zip(labels, found, strict=True))

    def has(self, kind: str, name: Label) -> bool:
        """Return whether the model has the label or id."""
        if isinstance(name, str):
            return self._ids[kind][name] >= 0
        return 0 <= name < self._counts[kind]

    def unknown(self, names: Iterable[Name]) -> Unknown | None:
        """Return the error of the first name that the model does not have."""
        return next((Unknown(*name) for name in names if not self.has(*name)), None)

    def of(self, kind: str, name: Label) -> int:
        """Return the id of a label that the model has, or the id itself."""
        return self._ids[kind][name] if isinstance(name, str) else name

    def of_entities(self, names: Iterable[Label]) -> np.ndarray:
        """Return the ids (M,) int64 of entities."""
        return np.array([self.of("entity", name) for name in names], np.int64)

    def of_triple(self, triple: Iterable[Label | None]) -> list[int]:
        """Return the three ids of a triple; a part that is None gets 0."""
        parts = zip(PARTS, triple, strict=True)
        return [0 if name is None else self.of(KIND_OF[part], name) for part, name in parts]


def vocabulary_of(model: TrainedModel, kind: str) -> Vocabulary:
    """Return the vocabulary of a kind, "entity" or "relation"."""
    return model.entity_labels if kind == "entity" else model.relation_labels


def _group(question: Question) -> tuple[Any, ...]:
    """Return a key that is equal for queries that one pass can answer."""
    if isinstance(question, Predict):
        return Predict, missing_part(question.query), question.known, question.facts
    if isinstance(question, Recommend):  # all fields but heads and k
        return Recommend, *astuple(replace(question, heads=(), k=1, relation=""))
    return (Score, question.side) if isinstance(question, Score) else (Nearest,)


def _predict(model: TrainedModel, group: list[Predict], ids: _Ids) -> list[list[Prediction]]:
    queries = torch.tensor([ids.of_triple(query.query) for query in group], dtype=torch.int64)
    choice = Choice(max(query.k for query in group), known_answers(model, group[0].known))
    results = predictions(model, missing_part(group[0].query), queries, choice)
    return _cut(group, results)


def _recommend(model: TrainedModel, group: list[Recommend], ids: _Ids) -> list[list[Recommended]]:
    choice = _choice(model, group[0], max(query.k for query in group), ids)
    asked = [(query, head) for query in group for head in query.heads if ids.has("entity", head)]
    triples = [ids.of_triple((head, query.relation, None)) for query, head in asked]
    queries = torch.tensor(triples, dtype=torch.int64).view(-1, 3)
    found = iter(predictions(model, "tail", queries, choice) if asked else [])
    results = []
    for query in group:
        lists, popular = [], None
        for head in query.heads:
            if ids.has("entity", head):
                lists.append(Recommended(head, next(found)[: query.k]))
                continue
            if popular is None:
                relation = ids.of("relation", query.relation)
                popular = most_popular(model, relation, query.k, choice.only)
            lists.append(Recommended(head, popular, "popular"))
        results.append(lists)
    return results


def _choice(model: TrainedModel, query: Recommend, k: int, ids: _Ids) -> Choice:
    """Return the answers that a query allows."""
    if isinstance(query.candidates, tuple):
        only: Candidates = ListedCandidates(ids.of_entities(query.candidates))
        choice = Choice(k, known_answers(model, not query.exclude_known), only, itself=False)
    else:
        choice = recommended(model, k, query.exclude_known, query.candidates)
    if query.exclude:
        others = model.ends if choice.only is None else choice.only
        only = WithoutListed(others, ids.of_entities(query.exclude))
        choice = replace(choice, only=only)
    return choice


def most_popular(
    model: TrainedModel, relation: int, k: int, only: Candidates | None
) -> list[Prediction]:
    """Return the most frequent tails of a relation in train; the score is their number."""
    index = model.store.side_index("train", "head")
    of_relation = relations_of(index.queries) == relation
    entities, counts = anchors_of(index.queries)[of_relation], np.diff(index.starts)[of_relation]
    if only is not None:
        is_candidate = only.contain("tail", np.full(len(entities), relation), entities)
        entities, counts = entities[is_candidate], counts[is_candidate]
    order = np.lexsort((entities, -counts))[:k]
    labels = model.entity_labels.labels(entities[order])
    pairs = zip(labels, counts[order].tolist(), strict=True)
    return [Prediction(rank, label, float(count)) for rank, (label, count) in enumerate(pairs, 1)]


def _cut(group: Sequence[Predict | Nearest], results: list[list[Any]]) -> list[Any]:
    """Return the first k answers of each query of a group."""
    return [answers[: query.k] for query, answers in zip(group, results, strict=True)]


def _score(model: TrainedModel, group: list[Score], ids: _Ids) -> list[list[float]]:
    triples = [ids.of_triple(triple) for query in group for triple in query.triples]
    triple_ids = torch.tensor(triples, dtype=torch.int64).view(-1, 3)
    scores = model.scores(triple_ids, group[0].side)
    sizes = [len(query.triples) for query in group]
    return [part.tolist() for part in scores.split(sizes)]


def _nearest(model: TrainedModel, group: list[Nearest], ids: _Ids) -> list[list[Neighbour]]:
    entities = torch.tensor([ids.of("entity", query.entity) for query in group], dtype=torch.int64)
    results = nearest(model, entities, max(query.k for query in group))
    return _cut(group, results)


_AnswerGroup = Callable[[TrainedModel, list[Any], _Ids], list[Any]]
_ANSWER_GROUP: dict[type, _AnswerGroup] = {
    Predict: _predict, Recommend: _recommend, Score: _score, Nearest: _nearest,
}  # fmt: skip
