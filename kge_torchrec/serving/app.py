"""HTTP endpoints, with the schemas of their requests and replies.

The endpoints are predict, recommend, score, nearest, labels, health, metrics and a page. FastAPI
validates the schemas and publishes them as OpenAPI. Every request gets a reply: an answer, a 4xx
status that says what is wrong, or 503 if too many requests are waiting.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pyarrow.compute as pc
from fastapi import Body, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.middleware.trustedhost import TrustedHostMiddleware

from kge_torchrec.answers.queries import MEANINGS, Neighbour, Prediction, metric_of
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import at_least
from kge_torchrec.errors import KGEError
from kge_torchrec.pages import render
from kge_torchrec.serving.batching import (
    Answerer,
    Busy,
    Nearest,
    Predict,
    Question,
    Recommend,
    Score,
    Unknown,
    vocabulary_of,
)
from kge_torchrec.trained_model import TrainedModel

MAX_TRIPLES = 10_000  # per request
MAX_HEADS = 1_000
MAX_FACTS = 1_000
MAX_ANSWERS = 100_000  # of all heads of a request
MAX_LABEL = 4_096  # characters

Name = Annotated[str, Field(strict=True, max_length=MAX_LABEL, description="a label")]
Id = Annotated[int, Field(strict=True, ge=0, lt=2**62, description="an id, from 0")]
NameOrId = Name | Id
Count = Annotated[int, Field(ge=1, lt=2**31, description="the number of answers")]
SideName = Literal["head", "tail"]
Label = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_LABEL)]
Facts = Annotated[
    tuple[tuple[Label, Label, Label], ...],
    Field(
        max_length=MAX_FACTS,
        description="triples of labels, each with one entity that the model does not have; the "
        "query may name these",
    ),
]


class StrictRequest(BaseModel):
    """Base of requests. Unknown keys are rejected, so misspelled keys are noticed."""

    model_config = ConfigDict(extra="forbid")


class PredictQuery(StrictRequest):
    """Two parts of a triple; the reply has the best answers for the third."""

    head: NameOrId | None = None
    relation: NameOrId | None = None
    tail: NameOrId | None = None
    k: Count = 10
    known: Annotated[
        bool, Field(description="whether to list answers that the data already holds")
    ] = True

    @model_validator(mode="after")
    def _two_parts(self) -> PredictQuery:
        is_set = [part is not None for part in (self.head, self.relation, self.tail)]
        if sum(is_set) != 2:
            raise ValueError("send two of head, relation and tail; the reply has the third")
        return self


class PredictRequest(PredictQuery):
    """Such parts, and perhaps facts of an entity that the model does not have."""

    facts: Facts = ()


class RecommendQuery(StrictRequest):
    """A head and a relation; the reply has the best tails, without the head itself."""

    head: NameOrId | None = None
    relation: NameOrId
    k: Count = 10
    exclude_known: Annotated[
        bool, Field(description="whether to leave out tails that the data holds")
    ] = False
    candidates: Annotated[
        Literal["seen", "all"], Field(description="tails of the relation in train, or all")
    ] = "seen"
    unknown: Annotated[
        Literal["error", "popular"],
        Field(description="what an unknown head gets: 404, or the most frequent tails in train"),
    ] = "error"


class RecommendRequest(RecommendQuery):
    """One head or many, and perhaps the entities to choose from and facts of new heads."""

    heads: Annotated[list[NameOrId] | None, Field(min_length=1, max_length=MAX_HEADS)] = None
    candidates: Annotated[
        Literal["seen", "all"] | Annotated[list[NameOrId], Field(min_length=1)],
        Field(description="as by GET, or the entities that may be recommended"),
    ] = "seen"  # type: ignore[assignment]
    exclude: Annotated[
        list[NameOrId], Field(description="entities that are not recommended, such as sold out")
    ] = []
    facts: Facts = ()

    @model_validator(mode="after")
    def _one_head_or_many(self) -> RecommendRequest:
        if (self.head is None) == (self.heads is None):
            raise ValueError("send either head or heads")
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
        str, Field(max_length=MAX_LABEL, description="a prefix, in upper or lower case")
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


class Recommended(Answers):
    """The answers to one head."""

    head: str | int
    fallback: Annotated[
        Literal["popular"] | None, Field(description="popular: the model does not have the head")
    ] = None


class Lists(BaseModel):
    """The answers to each head, in their order."""

    lists: list[Recommended]


class Scores(BaseModel):
    """Scores in the order of the triples; a score that is not a finite number is null."""

    scores: list[float | None]


class Neighbours(BaseModel):
    """Neighbors, nearest first; ``metric`` describes their scores."""

    metric: str
    neighbours: list[Scored]


class Labels(BaseModel):
    """A range of labels in order of id; ``count`` is the number of all."""

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
    answered: Annotated[int, Field(description="queries answered since the start")]
    batches: Annotated[int, Field(description="passes over the entities that answered them")]
    max_k: int
    loaded: Annotated[str, Field(description="when the model was loaded, in UTC")]
    problem: Annotated[
        str | None, Field(description="why the model was not replaced by a newer one")
    ] = None


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


_ABOUT = """\
Answers queries with a trained knowledge-graph embedding. Name an entity or relation by its label;
the body of a POST may also have its id. No request changes the model.
"""
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    404: {"model": UnknownName, "description": "unknown label or id, with similar labels"},
    413: {"model": Problem, "description": "request body too large"},
    422: {"model": Problem, "description": "invalid request"},
    503: {"model": Problem, "description": "too many requests are waiting"},
}
# The page loads nothing from other servers and sends requests only to this one.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
}


@dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Raises:
        ConfigError: A limit is below 1.
    """

    k: int = 1000  # answers per request
    body: int = 1 << 20  # bytes per request body
    batch: int = 64  # requests answered in one pass over the entities
    waiting: int = 1024  # requests that may wait at the same time

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            at_least(f"the limit of {name}", value, 1)


def create_app(
    model: TrainedModel,
    name: str,
    limits: Limits = Limits(),
    hosts: Collection[str] = ("*",),
    names: Mapping[str, str] = MappingProxyType({}),
) -> FastAPI:
    """Build the ASGI application of a model, whose name is for display.

    Queries are answered in a thread that ends with the application. ``hosts`` are the names that a
    Host header may contain; "*" allows all. This stops DNS rebinding: a page of another site cannot
    read from the server by pointing its own host name at this machine. ``names`` are readable names
    by label; if there are any, every answer has a ``name``, empty where its label has none.
    """
    answerer = Answerer(model, limits.batch, limits.waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(answerer.close)

    app = FastAPI(
        title=name, description=_ABOUT, lifespan=lifespan, responses=_PROBLEMS, redoc_url=None,
        max_body_size=limits.body,
    )  # fmt: skip
    allowed = [f"[{host}]" if ":" in host else host for host in hosts]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed, www_redirect=False)
    metrics = Instrumentator(registry=CollectorRegistry(), should_group_status_codes=False)
    metrics.instrument(app).expose(app, include_in_schema=False)
    app.state.answerer = answerer
    _handle_problems(app, answerer)
    _add_queries(app, answerer, limits, names)
    _add_labels(app, answerer)
    _add_descriptions(app, answerer, name, limits)
    return app


def _add_queries(
    app: FastAPI, answerer: Answerer, limits: Limits, names: Mapping[str, str]
) -> None:
    def rows(results: Sequence[Prediction | Neighbour]) -> list[dict[str, Any]]:
        named = [{"name": names.get(result.label, "")} if names else {} for result in results]
        return [asdict(result) | name for result, name in zip(results, named, strict=True)]

    async def ask(question: Question) -> Any:
        k = getattr(question, "k", 1)
        if k > limits.k:
            raise ConfigError(f"k must be at most {limits.k} here, got {k}")
        return await answerer.ask(question)

    @app.post("/predict", summary="The best answers to a triple with one missing part")
    async def predict(body: Annotated[PredictRequest, Body()]) -> Answers:
        query = body.head, body.relation, body.tail
        results = await ask(Predict(query, body.k, body.known, body.facts))
        return Answers.model_validate({"answers": rows(results)})

    @app.get("/predict", summary="The best answers, by labels")
    async def predict_get(body: Annotated[PredictQuery, Query()]) -> Answers:
        return await predict(PredictRequest(**dict(body)))

    @app.post("/recommend", summary="The best tails of a relation for one head or many")
    async def recommend(body: Annotated[RecommendRequest, Body()]) -> Recommended | Lists:
        heads: list[Any] = body.heads or [body.head]
        if len(heads) * body.k > MAX_ANSWERS:
            raise ConfigError(f"{len(heads)} heads times k must be at most {MAX_ANSWERS} answers")
        listed: Any = body.candidates
        question = Recommend(
            tuple(heads), body.relation, body.k, body.exclude_known,
            tuple(listed) if isinstance(listed, list) else listed,
            tuple(body.exclude), body.facts, body.unknown == "popular",
        )  # fmt: skip
        lists = [
            {"head": one.head, "answers": rows(one.answers), "fallback": one.fallback}
            for one in await ask(question)
        ]
        if body.heads is None:
            return Recommended.model_validate(lists[0])
        return Lists.model_validate({"lists": lists})

    @app.get("/recommend", summary="The best tails, by labels")
    async def recommend_get(body: Annotated[RecommendQuery, Query()]) -> Recommended | Lists:
        return await recommend(RecommendRequest(**dict(body)))

    @app.post("/score", summary="The scores of triples")
    async def score(body: Annotated[ScoreRequest, Body()]) -> Scores:
        results = await ask(Score(tuple(body.triples), body.side))
        return Scores(scores=[finite(result) for result in results])

    @app.get("/score", summary="The score of one triple, by labels")
    async def score_get(body: Annotated[TripleRequest, Query()]) -> Scores:
        triple = body.head, body.relation, body.tail
        return await score(ScoreRequest(triples=[triple], side=body.side))

    @app.post("/nearest", summary="The entities nearest to one")
    async def nearest(body: Annotated[NearestRequest, Body()]) -> Neighbours:
        results = await ask(Nearest(body.entity, body.k))
        values = {"neighbours": rows(results)}
        metric = MEANINGS[metric_of(answerer.model.scorer)]
        return Neighbours.model_validate({"metric": metric, **values})

    @app.get("/nearest", summary="The nearest entities, by label")
    async def nearest_get(body: Annotated[NearestRequest, Query()]) -> Neighbours:
        return await nearest(body)


def _add_labels(app: FastAPI, answerer: Answerer) -> None:
    def labels(kind: str, query: LabelsRequest) -> Labels:
        array = vocabulary_of(answerer.model, kind).array
        if query.prefix:
            array = array.filter(pc.starts_with(array, query.prefix, ignore_case=True))
        some = array[query.first : query.first + query.count]
        return Labels(labels=some.to_pylist(), count=len(array))

    # Not async, since they read all labels: FastAPI runs them in threads.
    @app.get("/entities", summary="Labels of entities")
    def entities(query: Annotated[LabelsRequest, Query()]) -> Labels:
        return labels("entity", query)

    @app.get("/relations", summary="Labels of relations")
    def relations(query: Annotated[LabelsRequest, Query()]) -> Labels:
        return labels("relation", query)


def _add_descriptions(app: FastAPI, answerer: Answerer, name: str, limits: Limits) -> None:
    @app.get("/health", summary="Status of the server and facts about its model")
    async def health() -> Health:
        model, scorer = answerer.model, answerer.model.scorer
        return Health(
            status="ok",
            model=name,
            scorer=scorer.name or type(scorer).__name__,
            formula=scorer.formula,
            dim=scorer.row_dim,
            entities=model.num_entities,
            relations=model.num_relations,
            answered=answerer.answered,
            batches=answerer.batches,
            max_k=limits.k,
            loaded=answerer.loaded.isoformat(timespec="seconds"),
            problem=answerer.problem,
        )

    @app.get("/", include_in_schema=False)
    async def root() -> HTMLResponse:
        page = render("serve.html", title=name, model=answerer.model, limits=limits)
        return HTMLResponse(page, headers=_PAGE_HEADERS)


def _handle_problems(app: FastAPI, answerer: Answerer) -> None:
    def problem(status: int, detail: str, **more: Any) -> JSONResponse:
        return JSONResponse({"detail": detail, **more}, status)

    @app.exception_handler(Unknown)
    def unknown(_: Request, error: Unknown) -> JSONResponse:  # in a thread, reads all labels
        labels = vocabulary_of(answerer.model, error.kind)
        close = labels.close_to(error.name) if isinstance(error.name, str) else []
        return problem(404, str(error), kind=error.kind, given=error.name, suggestions=close)

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> JSONResponse:
        return problem(503, str(error))

    @app.exception_handler(KGEError)
    async def refused(_: Request, error: KGEError) -> JSONResponse:
        return problem(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = dict.fromkeys(_readable(problem) for problem in error.errors())
        detail = "; ".join([*problems][:5])
        return problem(422, detail.encode("utf-8", "replace").decode())


def _readable(problem: Mapping[str, Any]) -> str:
    """Return what is wrong with a request, without its input, which may be unreadable text."""
    place = [str(part) for part in problem["loc"][1:]]
    kind, message = problem["type"], problem["msg"].removeprefix("Value error, ")
    if place and place[-1].startswith("constrained-"):  # a kind of NameOrId
        return f"{'.'.join(place[:-1])} must be a label of at most {MAX_LABEL} characters, or an id"
    where = ".".join(place)
    if kind == "json_invalid":
        return f"the body is not JSON: {problem['ctx']['error']}"
    if kind == "missing":
        return f"{where} is missing" if where else "the request has no body"
    if kind == "model_attributes_type":
        return "the body must be a JSON object, sent with Content-Type: application/json"
    if kind == "extra_forbidden":
        return f"{where} is not a field of this request"
    return f"{where}: {message}" if where else message
