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
from dataclasses import dataclass
from typing import Any

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
from kge_torchrec.errors import KGEError
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.trained_model import Label, TrainedModel

log = logging.getLogger(__name__)
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

    @property
    def labels(self) -> list[tuple[str, Label]]:
        parts = zip(PARTS, self.query, strict=True)
        return [(KIND_OF[part], name) for part, name in parts if name is not None]


@dataclass(frozen=True)
class Recommend:
    """A query for the k best tails of a head; see ``Answering.recommend``."""

    head: Label
    relation: Label
    k: int
    exclude_known: bool
    candidates: str | None  # "seen", "all" or None

    @property
    def labels(self) -> list[tuple[str, Label]]:
        return [("entity", self.head), ("relation", self.relation)]


@dataclass(frozen=True)
class Score:
    """A query for the scores of triples."""

    triples: tuple[tuple[Label, Label, Label], ...]
    side: Side

    @property
    def labels(self) -> list[tuple[str, Label]]:
        kinds = [KIND_OF[part] for part in PARTS]
        return [pair for triple in self.triples for pair in zip(kinds, triple, strict=True)]


@dataclass(frozen=True)
class Nearest:
    """A query for the k nearest entities to an entity."""

    entity: Label
    k: int

    @property
    def labels(self) -> list[tuple[str, Label]]:
        return [("entity", self.entity)]


Question = Predict | Recommend | Score | Nearest
Waiting = tuple[Question, "asyncio.Future[Any]"]


class Answerer:
    """A thread that answers queries in batches of at most ``most``; ``room`` queries may wait."""

    def __init__(self, model: TrainedModel, most: int = 64, room: int = 1024):
        self.model, self.most, self.room = model, most, room
        self.batches = self.answered = 0
        self._waiting: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    async def ask(self, question: Question) -> Any:
        """Return the answer to a query: list[Prediction], list[float] or list[Neighbour].

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
    ids = _Ids(model, [pair for question in questions for pair in question.labels])
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, question in enumerate(questions):
        try:
            for kind, name in question.labels:
                ids.of(kind, name)
            groups[_group(question)].append(place)
        except Unknown as error:
            results[place] = error
    for (of, *_), places in groups.items():
        group = [questions[place] for place in places]
        try:
            group_results = _ANSWER_GROUP[of](model, group, ids)
        except Exception as error:  # must not end the thread
            if not isinstance(error, KGEError):
                log.exception("a batch of %d queries failed", len(group))
            group_results = [error] * len(group)
        for place, result in zip(places, group_results, strict=True):
            results[place] = result
    return results


class _Ids:
    """The ids of all labels of a batch, looked up with one pass over each vocabulary."""

    def __init__(self, model: TrainedModel, pairs: Iterable[tuple[str, Label]]):
        self._counts = {"entity": model.num_entities, "relation": model.num_relations}
        ids_by_label: dict[str, dict[str, int]] = {"entity": {}, "relation": {}}
        for kind, name in pairs:
            if isinstance(name, str):
                ids_by_label[kind][name] = -1
        for kind, labels in ids_by_label.items():
            if labels:
                ids = vocabulary_of(model, kind).search(list(labels)).tolist()
                labels.update(zip(labels, ids, strict=True))
        self._ids = ids_by_label

    def of(self, kind: str, name: Label) -> int:
        """Return the id of a label, or a valid id itself.

        Raises:
            Unknown: The model does not have the label or id.
        """
        number = self._ids[kind][name] if isinstance(name, str) else name
        if not 0 <= number < self._counts[kind]:
            raise Unknown(kind, name)
        return number

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
        return Predict, missing_part(question.query), question.known
    if isinstance(question, Recommend):
        return Recommend, question.exclude_known, question.candidates
    return (Score, question.side) if isinstance(question, Score) else (Nearest,)


def _predict(model: TrainedModel, group: list[Predict], ids: _Ids) -> list[list[Prediction]]:
    queries = torch.tensor([ids.of_triple(query.query) for query in group], dtype=torch.int64)
    choice = Choice(max(query.k for query in group), known_answers(model, group[0].known))
    results = predictions(model, missing_part(group[0].query), queries, choice)
    return _cut(group, results)


def _recommend(model: TrainedModel, group: list[Recommend], ids: _Ids) -> list[list[Prediction]]:
    triples = [ids.of_triple((query.head, query.relation, None)) for query in group]
    most, first = max(query.k for query in group), group[0]
    choice = recommended(model, most, first.exclude_known, first.candidates)
    results = predictions(model, "tail", torch.tensor(triples, dtype=torch.int64), choice)
    return _cut(group, results)


def _cut(group: Sequence[Predict | Recommend | Nearest], results: list[list[Any]]) -> list[Any]:
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
