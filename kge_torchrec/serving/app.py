"""HTTP endpoints.

FastAPI validates requests and publishes their schemas as OpenAPI. Every request gets a reply: an
answer, a 4xx status that says what is wrong, or 503 if too many requests are waiting.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Annotated, Any

import pyarrow.compute as pc
from fastapi import Body, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from pydantic import Field
from starlette.middleware.trustedhost import TrustedHostMiddleware

from kge_torchrec.answers.queries import MEANINGS, Neighbour, Prediction, metric_of
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import KGEError
from kge_torchrec.pages import render
from kge_torchrec.serving.batching import Answerer, Busy
from kge_torchrec.serving.questions import (
    MAX_LABEL,
    NearestRequest,
    PredictRequest,
    Question,
    RecommendRequest,
    ScoreRequest,
    StrictRequest,
    Unknown,
    vocabulary_of,
)
from kge_torchrec.trained_model import TrainedModel

MAX_ANSWERS = 100_000  # of all heads of a request
MAX_BODY = 4 << 20  # bytes of a request


class LabelsRequest(StrictRequest):
    """A range of all labels, or of the labels with a prefix."""

    first: Annotated[int, Field(ge=0, lt=2**62)] = 0
    count: Annotated[int, Field(ge=1, le=1000)] = 100
    prefix: Annotated[
        str, Field(max_length=MAX_LABEL, description="a prefix, in upper or lower case")
    ] = ""


_ABOUT = """\
Answers queries with a trained knowledge-graph embedding. Name an entity or relation by its label;
the body of a POST may also have its id. No request changes the model.
"""
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    404: {"description": "unknown label or id, with similar labels"},
    413: {"description": "request body too large"},
    422: {"description": "invalid request"},
    503: {"description": "too many requests are waiting"},
}
# The page loads nothing from other servers and sends requests only to this one.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
}


def create_app(
    model: TrainedModel,
    name: str,
    max_k: int = 1000,
    hosts: Collection[str] = ("*",),
    names: Mapping[str, str] = MappingProxyType({}),
) -> FastAPI:
    """Build the ASGI application of a model, whose name is for display.

    A reply has at most ``max_k`` answers to a query. ``hosts`` are the names that a Host header may
    contain; "*" allows all. This stops DNS rebinding: a page of another site cannot read from the
    server by pointing its own host name at this machine. ``names`` are readable names by label; if
    there are any, every answer has a ``name``, empty where its label has none.
    """
    app = FastAPI(
        title=name, description=_ABOUT, responses=_PROBLEMS, redoc_url=None, max_body_size=MAX_BODY
    )
    allowed = [f"[{host}]" if ":" in host else host for host in hosts]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed, www_redirect=False)
    metrics = Instrumentator(registry=CollectorRegistry(), should_group_status_codes=False)
    metrics.instrument(app).expose(app, include_in_schema=False)
    app.state.answerer = answerer = Answerer(model)
    _handle_problems(app, answerer)
    _add_queries(app, answerer, max_k, names)
    _add_labels(app, answerer)
    _add_descriptions(app, answerer, name, max_k)
    return app


def finite(score: float) -> float | None:
    """Return a score, or None if it is not finite, which JSON cannot represent."""
    return score if math.isfinite(score) else None


def _add_queries(app: FastAPI, answerer: Answerer, max_k: int, names: Mapping[str, str]) -> None:
    def rows(results: Sequence[Prediction | Neighbour]) -> list[dict[str, Any]]:
        found = [asdict(one) | {"score": finite(one.score)} for one in results]
        return [row | {"name": names.get(row["label"], "")} for row in found] if names else found

    async def ask(question: Question) -> Any:
        k = getattr(question, "k", 1)
        if k > max_k:
            raise ConfigError(f"k must be at most {max_k} here, got {k}")
        return await answerer.ask(question)

    @app.post("/predict", summary="The best answers to a triple with one missing part")
    async def predict(body: Annotated[PredictRequest, Body()]) -> JSONResponse:
        return JSONResponse({"answers": rows(await ask(body))})

    @app.post("/recommend", summary="The best tails of a relation for some heads")
    async def recommend(body: Annotated[RecommendRequest, Body()]) -> JSONResponse:
        count = len(body.heads)
        if count * body.k > MAX_ANSWERS:
            raise ConfigError(f"{count} heads times k must be at most {MAX_ANSWERS} answers")
        found = [one._asdict() | {"answers": rows(one.answers)} for one in await ask(body)]
        return JSONResponse({"lists": found})

    @app.post("/score", summary="The scores of triples")
    async def score(body: Annotated[ScoreRequest, Body()]) -> JSONResponse:
        return JSONResponse({"scores": [finite(score) for score in await ask(body)]})

    @app.post("/nearest", summary="The entities nearest to one")
    async def nearest(body: Annotated[NearestRequest, Body()]) -> JSONResponse:
        metric = MEANINGS[metric_of(answerer.model.scorer)]
        return JSONResponse({"metric": metric, "neighbours": rows(await ask(body))})


def _add_labels(app: FastAPI, answerer: Answerer) -> None:
    def labels(kind: str, query: LabelsRequest) -> JSONResponse:
        array = vocabulary_of(answerer.model, kind).array
        if query.prefix:
            array = array.filter(pc.starts_with(array, query.prefix, ignore_case=True))
        some = array[query.first : query.first + query.count]
        return JSONResponse({"labels": some.to_pylist(), "count": len(array)})

    # Not async, since they read all labels: FastAPI runs them in threads.
    @app.get("/entities", summary="Labels of entities in order of id, and how many there are")
    def entities(query: Annotated[LabelsRequest, Query()]) -> JSONResponse:
        return labels("entity", query)

    @app.get("/relations", summary="Labels of relations in order of id, and how many there are")
    def relations(query: Annotated[LabelsRequest, Query()]) -> JSONResponse:
        return labels("relation", query)


def _add_descriptions(app: FastAPI, answerer: Answerer, name: str, max_k: int) -> None:
    @app.get("/health", summary="Status of the server and facts about its model")
    async def health() -> dict[str, Any]:
        model, scorer = answerer.model, answerer.model.scorer
        return {
            "status": "ok",
            "model": name,
            "scorer": scorer.name or type(scorer).__name__,
            "formula": scorer.formula,
            "dim": scorer.row_dim,
            "entities": model.num_entities,
            "relations": model.num_relations,
            "answered": answerer.answered,  # queries since the start
            "batches": answerer.batches,  # passes over the entities that answered them
            "max_k": max_k,
            "loaded": answerer.loaded.isoformat(timespec="seconds"),  # UTC
            "problem": answerer.problem,
        }

    @app.get("/", include_in_schema=False)
    async def root() -> HTMLResponse:
        page = render("serve.html", title=name, model=answerer.model, max_k=max_k)
        return HTMLResponse(page, headers=_PAGE_HEADERS)


def _handle_problems(app: FastAPI, answerer: Answerer) -> None:
    def problem(status: int, detail: str, **more: Any) -> JSONResponse:
        return JSONResponse({"detail": detail, **more}, status)

    @app.exception_handler(Unknown)
    def unknown(_: Request, error: Unknown) -> JSONResponse:  # in a thread, reads all labels
        labels = vocabulary_of(answerer.model, error.kind)
        close = labels.close_to(error.name) if isinstance(error.name, str) else []
        return problem(404, str(error), kind=error.kind, given=error.name, suggestions=close)

    @app.exception_handler(KGEError)
    async def refused(_: Request, error: KGEError) -> JSONResponse:
        return problem(503 if isinstance(error, Busy) else 422, str(error))

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
