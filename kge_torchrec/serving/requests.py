"""Request and reply schemas, which FastAPI validates and publishes as OpenAPI."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kge_torchrec.serving.label_index import COMPARED

MAX_TRIPLES = 10_000  # per request
MAX_LABEL = 4_096  # characters

Name = Annotated[str, Field(strict=True, max_length=MAX_LABEL, description="a label")]
Id = Annotated[int, Field(strict=True, ge=0, lt=2**62, description="an id, from 0")]
NameOrId = Name | Id
Count = Annotated[int, Field(ge=1, lt=2**31, description="the number of answers")]
SideName = Literal["head", "tail"]


class StrictRequest(BaseModel):
    """Base of requests. Unknown keys are rejected, so misspelled keys are noticed."""

    model_config = ConfigDict(extra="forbid")


class PredictRequest(StrictRequest):
    """Two parts of a triple; the reply has the best answers for the third."""

    head: NameOrId | None = None
    relation: NameOrId | None = None
    tail: NameOrId | None = None
    k: Count = 10
    known: Annotated[
        bool, Field(description="whether to list answers that the data already holds")
    ] = True

    @model_validator(mode="after")
    def _two_parts(self) -> PredictRequest:
        is_set = [part is not None for part in (self.head, self.relation, self.tail)]
        if sum(is_set) != 2:
            raise ValueError("send two of head, relation and tail; the reply has the third")
        return self


class ScoreRequest(StrictRequest):
    """Triples to score."""

    triples: Annotated[
        list[tuple[NameOrId, NameOrId, NameOrId]],
        Field(min_length=1, max_length=MAX_TRIPLES, description="head, relation, tail each"),
    ]
    side: Annotated[
        SideName, Field(description="the missing end of the query that scores the triples")
    ] = "tail"


class TripleRequest(StrictRequest):
    """One triple to score."""

    head: NameOrId
    relation: NameOrId
    tail: NameOrId
    side: SideName = "tail"


class NearestRequest(StrictRequest):
    """An entity whose nearest entities are returned."""

    entity: NameOrId
    k: Count = 10


class LabelsRequest(StrictRequest):
    """A range of all labels, or of the labels with a prefix."""

    first: Annotated[int, Field(ge=0, lt=2**62)] = 0
    count: Annotated[int, Field(ge=1, le=1000)] = 100
    prefix: Annotated[
        str, Field(max_length=COMPARED, description="a prefix, in upper or lower case")
    ] = ""


class Scored(BaseModel):
    """A label with a score; a score that is not a finite number is null."""

    model_config = ConfigDict(extra="allow")

    rank: int
    label: str
    score: float | None

    @field_validator("score", mode="before")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        return finite(value)


class Answer(Scored):
    """An answer; ``known`` is the split of the data that holds the completed triple."""

    known: str | None = None
    probability: Annotated[float | None, Field(description="null unless calibrated")] = None


class Answers(BaseModel):
    """Answers, best first."""

    answers: list[Answer]


class Scores(BaseModel):
    """Scores in the order of the triples; a score that is not a finite number is null."""

    scores: list[float | None]


class Neighbours(BaseModel):
    """Neighbors, nearest first; ``metric`` describes their scores."""

    metric: str
    neighbours: list[Scored]


class Labels(BaseModel):
    """Labels in order of id, or in order of text with a prefix; ``count`` is the number of all."""

    labels: list[str]
    count: int


class Health(BaseModel):
    """The state of the server and its model."""

    status: Literal["ok"]
    model: str
    scorer: str
    formula: str
    dim: int
    entities: int
    relations: int
    has_data: Annotated[bool, Field(description="whether known answers can be marked")]
    answered: Annotated[int, Field(description="queries answered since the start")]
    batches: Annotated[int, Field(description="passes over the entities that answered them")]
    max_k: int


class Problem(BaseModel):
    """The reason why a request is rejected."""

    detail: str


class UnknownName(Problem):
    """A label or id that the model does not have."""

    kind: Literal["entity", "relation"]
    name: Annotated[str | int, Field(alias="given")]
    suggestions: list[str]


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, since JSON cannot represent it."""
    return value if math.isfinite(value) else None
