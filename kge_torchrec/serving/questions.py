"""The requests that ask a model, with their schemas, and how several are answered in one pass.

FastAPI validates the schemas and publishes them as OpenAPI.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kge_torchrec.answers.queries import (
    PARTS,
    Choice,
    Neighbour,
    Prediction,
    missing_part,
    nearest,
    predictions,
)
from kge_torchrec.answers.sources import recommended
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import KGEError
from kge_torchrec.ranking.candidates import Candidates, ListedCandidates
from kge_torchrec.trained_model import TrainedModel

log = logging.getLogger(__name__)

MAX_TRIPLES = 10_000  # per request
MAX_HEADS = 1_000
MAX_FACTS = 1_000
MAX_LABEL = 4_096  # characters
KIND_OF = {"head": "entity", "relation": "relation", "tail": "entity"}

Name = Annotated[str, Field(strict=True, max_length=MAX_LABEL, description="a label")]
Id = Annotated[int, Field(strict=True, ge=0, lt=2**62, description="an id, from 0")]
NameOrId = Name | Id
Named = tuple[str, str | int]  # "entity" or "relation", and a label or id
Ids = Mapping[Named, int]
Triple = tuple[NameOrId, NameOrId, NameOrId]
Count = Annotated[int, Field(ge=1, lt=2**31, description="the number of answers")]
Label = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_LABEL)]
Facts = Annotated[
    tuple[tuple[Label, Label, Label], ...],
    Field(
        max_length=MAX_FACTS,
        description="triples of labels, each with one entity that the model does not have; the "
        "query may name these",
    ),
]


class Unknown(KGEError):
    """A label or id that the model does not have, of an "entity" or a "relation"."""

    def __init__(self, kind: str, name: str | int):
        super().__init__(f"unknown {kind} {name!r}")
        self.kind, self.name = kind, name


class StrictRequest(BaseModel):
    """Base of requests. Unknown keys are rejected, so misspelled keys are noticed."""

    model_config = ConfigDict(extra="forbid")


class Question(StrictRequest):
    """A request that a model answers, together with others of its group."""

    @property
    def group(self) -> tuple[Any, ...]:
        """A key that is equal for questions that one pass can answer."""
        return (type(self),)

    @property
    def names(self) -> list[Named]:
        """The names to look up."""
        raise NotImplementedError

    @property
    def may_be_unknown(self) -> Sequence[str | int]:
        """Entities whose absence is no error."""
        return ()

    @staticmethod
    def answers(model: TrainedModel, group: Sequence[Any], ids: Ids) -> Iterable[Any]:
        """Return the answer to each question of a group; the model has their names."""
        raise NotImplementedError


class PredictRequest(Question):
    """Two parts of a triple; the reply has the best answers for the third."""

    head: NameOrId | None = None
    relation: NameOrId | None = None
    tail: NameOrId | None = None
    k: Count = 10
    known: Annotated[
        bool, Field(description="whether to list answers that the data already holds")
    ] = True
    facts: Facts = ()

    @model_validator(mode="after")
    def _two_parts(self) -> PredictRequest:
        if self.parts.count(None) != 1:
            raise ValueError("send two of head, relation and tail; the reply has the third")
        return self

    @property
    def parts(self) -> tuple[NameOrId | None, ...]:
        return self.head, self.relation, self.tail

    @property
    def names(self) -> list[Named]:
        parts = zip(PARTS, self.parts, strict=True)
        return [(KIND_OF[part], name) for part, name in parts if name is not None]

    @property
    def group(self) -> tuple[Any, ...]:
        return PredictRequest, missing_part(self.parts), self.known, self.facts

    @staticmethod
    def answers(
        model: TrainedModel, group: Sequence[PredictRequest], ids: Ids
    ) -> list[list[Prediction]]:
        queries = [
            [0 if name is None else ids[KIND_OF[part], name]
             for part, name in zip(PARTS, question.parts, strict=True)]
            for question in group
        ]  # fmt: skip
        choice = Choice(max(x.k for x in group), None if group[0].known else model.known)
        found = predictions(model, missing_part(group[0].parts), np.array(queries), choice)
        return [listed[: x.k] for x, listed in zip(group, found, strict=True)]


class Recommended(NamedTuple):
    """The answers to one head."""

    head: str | int
    answers: list[Prediction]
    fallback: str | None  # "popular" if the model does not have the head


class RecommendRequest(Question):
    """Heads and a relation; the reply has the best tails of each, without the head itself."""

    heads: Annotated[tuple[NameOrId, ...], Field(min_length=1, max_length=MAX_HEADS)]
    relation: NameOrId
    k: Count = 10
    exclude_known: Annotated[
        bool, Field(description="whether to leave out tails that the data holds")
    ] = False
    candidates: Annotated[
        Literal["seen", "all"] | Annotated[tuple[NameOrId, ...], Field(min_length=1)],
        Field(description="tails of the relation in train, all entities, or the listed ones"),
    ] = "seen"
    exclude: Annotated[
        tuple[NameOrId, ...],
        Field(description="entities that are not recommended, such as sold out"),
    ] = ()
    unknown: Annotated[
        Literal["error", "popular"],
        Field(description="what an unknown head gets: 404, or the most frequent tails in train"),
    ] = "error"
    facts: Facts = ()

    @property
    def group(self) -> tuple[Any, ...]:
        kept = self.exclude_known, self.candidates, self.exclude, self.facts
        return RecommendRequest, *kept

    @property
    def names(self) -> list[Named]:
        listed = () if isinstance(self.candidates, str) else self.candidates
        entities = (*listed, *self.exclude, *self.heads)
        return [("relation", self.relation), *(("entity", name) for name in entities)]

    @property
    def may_be_unknown(self) -> Sequence[str | int]:
        return self.heads if self.unknown == "popular" else ()

    @staticmethod
    def answers(
        model: TrainedModel, group: Sequence[RecommendRequest], ids: Ids
    ) -> list[list[Recommended]]:
        def numbers(names: Iterable[str | int]) -> np.ndarray:
            return np.array([ids["entity", name] for name in names], np.int64)

        first, k = group[0], max(question.k for question in group)
        if isinstance(first.candidates, str):
            choice = recommended(model, k, first.exclude_known, first.candidates)
        else:
            exclude = model.known if first.exclude_known else None
            only = ListedCandidates(numbers(first.candidates))
            choice = Choice(k, exclude, only, itself=False)
        choice = replace(choice, left_out=numbers(first.exclude))
        queries = [
            [ids["entity", head], ids["relation", question.relation], 0]
            for question in group for head in question.heads if ids["entity", head] >= 0
        ]  # fmt: skip
        found = iter(predictions(model, "tail", np.array(queries), choice) if queries else [])
        results = []
        for question in group:
            popular = most_popular(model, ids["relation", question.relation], question.k, choice)
            results.append([
                Recommended(head, next(found)[: question.k], None)
                if ids["entity", head] >= 0 else Recommended(head, popular, "popular")
                for head in question.heads
            ])  # fmt: skip
        return results


def most_popular(model: TrainedModel, relation: int, k: int, choice: Choice) -> list[Prediction]:
    """Return the most frequent tails of a relation in train; the score is their number."""
    entities, counts = model.frequencies.pairs("tail", relation)
    fits = ~np.isin(entities, () if choice.left_out is None else choice.left_out)
    only: Candidates | None = model.ends if choice.only is None else choice.only
    if only is not None:
        fits &= only.contain("tail", np.full(len(entities), relation), entities)
    entities, counts = entities[fits], counts[fits]
    order = np.lexsort((entities, -counts))[:k]
    labels = model.entity_labels.labels(entities[order])
    pairs = zip(labels, counts[order].tolist(), strict=True)
    return [Prediction(rank, label, float(count)) for rank, (label, count) in enumerate(pairs, 1)]


class ScoreRequest(Question):
    """Triples to score."""

    triples: Annotated[
        tuple[Triple, ...],
        Field(min_length=1, max_length=MAX_TRIPLES, description="head, relation, tail each"),
    ]
    side: Annotated[
        Literal["head", "tail"],
        Field(description="the missing end of the query that scores the triples"),
    ] = "tail"

    @property
    def group(self) -> tuple[Any, ...]:
        return ScoreRequest, self.side

    @property
    def names(self) -> list[Named]:
        kinds = KIND_OF.values()
        return [pair for triple in self.triples for pair in zip(kinds, triple, strict=True)]

    @staticmethod
    def answers(model: TrainedModel, group: Sequence[ScoreRequest], ids: Ids) -> list[list[float]]:
        numbers = [ids[name] for question in group for name in question.names]
        scores = model.scores(torch.tensor(numbers).view(-1, 3), group[0].side)
        return [part.tolist() for part in scores.split([len(x.triples) for x in group])]


class NearestRequest(Question):
    """An entity whose nearest entities are returned."""

    entity: NameOrId
    k: Count = 10

    @property
    def names(self) -> list[Named]:
        return [("entity", self.entity)]

    @staticmethod
    def answers(
        model: TrainedModel, group: Sequence[NearestRequest], ids: Ids
    ) -> list[list[Neighbour]]:
        entities = torch.tensor([ids["entity", question.entity] for question in group])
        found = nearest(model, entities, max(question.k for question in group))
        return [listed[: x.k] for x, listed in zip(group, found, strict=True)]


def answers(model: TrainedModel, questions: Sequence[Question]) -> list[Any]:
    """Return the answer to each query, or its exception, which does not affect other queries."""
    results: list[Any] = [None] * len(questions)
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, question in enumerate(questions):
        groups[question.group].append(place)
    ids = ids_of(model, (name for question in questions for name in question.names))
    for places in groups.values():
        group = [questions[place] for place in places]
        try:
            found = _answered(model, group, ids)
        except Exception as error:
            if not isinstance(error, KGEError):
                log.exception("a batch of %d queries failed", len(group))
            found = [error] * len(group)
        for place, result in zip(places, found, strict=True):
            results[place] = result
    return results


def _answered(model: TrainedModel, group: Sequence[Question], ids: Ids) -> list[Any]:
    """Return the answers to queries of one group; a query with an unknown name gets that error."""
    if facts := getattr(group[0], "facts", ()):
        from kge_torchrec.answers.fold_in import fold_in

        model = fold_in(model, facts)
        ids = ids_of(model, (name for question in group for name in question.names))
    unknown = [
        [name for name in x.names if ids[name] < 0 and name[1] not in x.may_be_unknown]
        for x in group
    ]
    errors = [Unknown(*names[0]) if names else None for names in unknown]
    good = [question for question, error in zip(group, errors, strict=True) if error is None]
    found = iter(group[0].answers(model, good, ids) if good else ())
    return [next(found) if error is None else error for error in errors]


def vocabulary_of(model: TrainedModel, kind: str) -> Vocabulary:
    """Return the vocabulary of a kind, "entity" or "relation"."""
    return model.entity_labels if kind == "entity" else model.relation_labels


def ids_of(model: TrainedModel, names: Iterable[Named]) -> dict[Named, int]:
    """Return the ids of all names, -1 for unknown ones, by one pass over each vocabulary."""
    ids: dict[Named, int] = {}
    distinct = set(names)
    for kind, count in (("entity", model.num_entities), ("relation", model.num_relations)):
        own = [name for of, name in distinct if of == kind]
        labels = [name for name in own if isinstance(name, str)]
        found = vocabulary_of(model, kind).search(labels).tolist() if labels else []
        ids |= {(kind, label): id for label, id in zip(labels, found, strict=True)}
        numbers = (name for name in own if isinstance(name, int))
        ids |= {(kind, number): number if number < count else -1 for number in numbers}
    return ids
