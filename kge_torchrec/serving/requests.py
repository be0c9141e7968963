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
Given = Name | Id
Count = Annotated[int, Field(ge=1, lt=2**31, description="answers wanted")]
SideAsked = Literal["head", "tail"]


class Asked(BaseModel):
    """Base of requests. Unknown keys are rejected, so misspelled keys are noticed."""

    model_config = ConfigDict(extra="forbid")


class PredictAsked(Asked):
    """Two parts of a triple; the reply has the best answers for the third."""

    head: Given | None = None
    relation: Given | None = None
    tail: Given | None = None
    k: Count = 10
    known: Annotated[bool, Field(description="list what the data holds already, too")] = True

    @model_validator(mode="after")
    def _two_parts(self) -> PredictAsked:
        given = [part is not None for part in (self.head, self.relation, self.tail)]
        if sum(given) != 2:
            raise ValueError("give two of head, relation and tail; the third is looked for")
        return self


class ScoreAsked(Asked):
    """Triples to score."""

    triples: Annotated[
        list[tuple[Given, Given, Given]],
        Field(min_length=1, max_length=MAX_TRIPLES, description="head, relation, tail each"),
    ]
    side: Annotated[SideAsked, Field(description="the end that is asked for")] = "tail"


class TripleAsked(Asked):
    """One triple to score."""

    head: Given
    relation: Given
    tail: Given
    side: SideAsked = "tail"


class NearestAsked(Asked):
    """An entity whose nearest entities are returned."""

    entity: Given
    k: Count = 10


class LabelsAsked(Asked):
    """A range of all labels, or of the labels with a prefix."""

    first: Annotated[int, Field(ge=0, lt=2**62)] = 0
    count: Annotated[int, Field(ge=1, le=1000)] = 100
    prefix: Annotated[str, Field(max_length=COMPARED, description="in either case")] = ""


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
    has_data: Annotated[bool, Field(description="whether known answers can be told apart")]
    answered: Annotated[int, Field(description="questions so far")]
    batches: Annotated[int, Field(description="passes in which they were answered")]
    max_k: int


class Problem(BaseModel):
    """The reason why a request is rejected."""

    detail: str


class NotThere(Problem):
    """A label or id that the model does not have."""

    kind: Literal["entity", "relation"]
    given: str | int
    suggestions: list[str]


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, since JSON cannot represent it."""
    return value if math.isfinite(value) else None
