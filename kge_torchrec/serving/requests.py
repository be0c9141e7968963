"""What is asked and answered over HTTP; FastAPI checks it, and describes it as OpenAPI."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kge_torchrec.serving.label_index import COMPARED

MAX_TRIPLES = 10_000  # of one request
MAX_LABEL = 4_096  # characters

Name = Annotated[str, Field(strict=True, max_length=MAX_LABEL, description="a label")]
Id = Annotated[int, Field(strict=True, ge=0, lt=2**62, description="an id, from 0")]
Given = Name | Id
Count = Annotated[int, Field(ge=1, lt=2**31, description="answers wanted")]
SideAsked = Literal["head", "tail"]


class Asked(BaseModel):
    """A request: a key that it does not have is refused, so that a mistyped one is noticed."""

    model_config = ConfigDict(extra="forbid")


class PredictAsked(Asked):
    """Two parts of a triple; the third is looked for."""

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
    """An entity, whose neighbours are looked for."""

    entity: Given
    k: Count = 10


class LabelsAsked(Asked):
    """A stretch of all labels, or of those that begin with a prefix."""

    first: Annotated[int, Field(ge=0, lt=2**62)] = 0
    count: Annotated[int, Field(ge=1, le=1000)] = 100
    prefix: Annotated[str, Field(max_length=COMPARED, description="in either case")] = ""


class Scored(BaseModel):
    """A label with a score; null stands for a score that is no number."""

    model_config = ConfigDict(extra="allow")

    rank: int
    label: str
    score: float | None

    @field_validator("score", mode="before")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        return finite(value)


class Answer(Scored):
    """An answer; known: the split of the data that holds the completed triple."""

    known: str | None = None
    probability: Annotated[float | None, Field(description="null unless calibrated")] = None


class Answers(BaseModel):
    """Best first."""

    answers: list[Answer]


class Scores(BaseModel):
    """In the order of the triples; null stands for a score that is no number."""

    scores: list[float | None]


class Neighbours(BaseModel):
    """Nearest first; metric: what the scores are."""

    metric: str
    neighbours: list[Scored]


class Labels(BaseModel):
    """Labels in order of id, with a prefix in order of text; count: how many there are in all."""

    labels: list[str]
    count: int


class Health(BaseModel):
    """That the server answers, and what of."""

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
    """What is wrong with a request."""

    detail: str


class NotThere(Problem):
    """A label or id that the model does not have."""

    kind: Literal["entity", "relation"]
    given: str | int
    suggestions: list[str]


def finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None
