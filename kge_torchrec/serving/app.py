"""The server's addresses: predict, score, nearest, labels, health, a page to try it, its OpenAPI.

Whatever is asked gets an answer or a 4xx that says what is wrong; 503 while too many wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Body, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kge_torchrec.answers.model import AnsweringModel
from kge_torchrec.answers.nearest import MEANINGS, metric_of
from kge_torchrec.answers.predictions import Query as Triple
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import KGEError
from kge_torchrec.serving import requests as form
from kge_torchrec.serving.batching import (
    Answerer,
    Busy,
    Nearest,
    Predict,
    Question,
    Score,
    Unknown,
    vocabulary_of,
)

_ABOUT = """\
Answers of a trained knowledge-graph embedding. An entity or relation is given as its label, or in
the body of a POST also as its id. Nothing here changes anything.
"""
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    404: {"model": form.NotThere, "description": "an unknown label, with those like it"},
    413: {"model": form.Problem, "description": "the body is too large"},
    422: {"model": form.Problem, "description": "the request makes no sense"},
    503: {"model": form.Problem, "description": "too many requests wait"},
}


@dataclass(frozen=True)
class Limits:
    """k: answers of a request; body: bytes of it; batch: requests in a pass; waiting: at once."""

    k: int = 1000
    body: int = 1 << 20
    batch: int = 64
    waiting: int = 1024

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"the limit of {name} must be an integer >= 1, got {value}")


def create_app(model: AnsweringModel, name: str, limits: Limits = Limits()) -> FastAPI:
    """An ASGI application that answers from a model.

    name: of the model, for people.  It answers in a thread, which ends with the application.
    """
    answerer = Answerer(model, limits.batch, limits.waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(answerer.close)

    app = FastAPI(
        title=name, description=_ABOUT, lifespan=lifespan, docs_url=None, redoc_url=None,
        responses=_PROBLEMS,
    )  # fmt: skip
    app.add_middleware(SmallBodies, most=limits.body)
    _handle_problems(app, model)
    _add_questions(app, answerer, limits)
    _add_descriptions(app, answerer, name, limits)
    return app


def _add_questions(app: FastAPI, answerer: Answerer, limits: Limits) -> None:
    async def ask(question: Question) -> Any:
        k = getattr(question, "k", 1)
        if k > limits.k:
            raise ConfigError(f"k must be at most {limits.k} here, got {k}")
        return await answerer.ask(question)

    async def predict(asked: form.PredictAsked) -> form.Answers:
        query = Triple(asked.head, asked.relation, asked.tail)
        found = await ask(Predict(query, asked.k, asked.known))
        return form.Answers.model_validate({"answers": [asdict(one) for one in found]})

    async def score(triples: Sequence[Any], side: form.SideAsked) -> form.Scores:
        found = await ask(Score(tuple(triples), side))
        return form.Scores(scores=[form.finite(one) for one in found])

    async def nearest(asked: form.NearestAsked) -> form.Neighbours:
        found = await ask(Nearest(asked.entity, asked.k))
        metric = MEANINGS[metric_of(answerer.model.scorer)]
        return form.Neighbours.model_validate(
            {"metric": metric, "neighbours": [asdict(one) for one in found]}
        )

    @app.get("/predict", summary="The best answers, by labels")
    async def predict_by_address(
        asked: Annotated[form.PredictNamed, Query()],
    ) -> form.Answers:
        return await predict(asked)

    @app.post("/predict", summary="The best answers to a triple with one part missing")
    async def predict_by_body(asked: Annotated[form.PredictAsked, Body()]) -> form.Answers:
        return await predict(asked)

    @app.get("/score", summary="The score of one triple, by labels")
    async def score_by_address(asked: Annotated[form.ScoreNamed, Query()]) -> form.Scores:
        return await score([(asked.head, asked.relation, asked.tail)], asked.side)

    @app.post("/score", summary="The scores of triples")
    async def score_by_body(asked: Annotated[form.ScoreAsked, Body()]) -> form.Scores:
        return await score(asked.triples, asked.side)

    @app.get("/nearest", summary="The nearest entities, by label")
    async def nearest_by_address(
        asked: Annotated[form.NearestNamed, Query()],
    ) -> form.Neighbours:
        return await nearest(asked)

    @app.post("/nearest", summary="The entities nearest to one")
    async def nearest_by_body(asked: Annotated[form.NearestAsked, Body()]) -> form.Neighbours:
        return await nearest(asked)


def _add_descriptions(app: FastAPI, answerer: Answerer, name: str, limits: Limits) -> None:
    model = answerer.model

    def labels(kind: str, asked: form.LabelsAsked) -> form.Labels:
        array = vocabulary_of(model, kind).array
        return form.Labels(
            labels=array[asked.first : asked.first + asked.count].to_pylist(), count=len(array)
        )

    @app.get("/entities", summary="Labels of entities")
    async def entities(asked: Annotated[form.LabelsAsked, Query()]) -> form.Labels:
        return labels("entity", asked)

    @app.get("/relations", summary="Labels of relations")
    async def relations(asked: Annotated[form.LabelsAsked, Query()]) -> form.Labels:
        return labels("relation", asked)

    @app.get("/health", summary="That the server answers, and what of")
    async def health() -> form.Health:
        scorer = model.scorer
        return form.Health(
            status="ok",
            model=name,
            scorer=scorer.name or type(scorer).__name__,
            formula=scorer.formula,
            dim=scorer.dim,
            entities=model.num_entities,
            relations=model.num_relations,
            has_data=model.store is not None,
            answered=answerer.answered,
            batches=answerer.batches,
            max_k=limits.k,
        )

    for address, file in (("/", "page.html"), ("/docs", "docs.html")):
        text = (files(__package__) / file).read_text(encoding="utf-8")
        app.add_api_route(address, _page(text), include_in_schema=False)


def _page(text: str) -> Callable[[], Awaitable[HTMLResponse]]:
    # Nothing from elsewhere: the page is whole, and asks this server alone.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    headers = {"Content-Security-Policy": f"{policy}connect-src 'self'; img-src data:"}

    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    return page


def _handle_problems(app: FastAPI, model: AnsweringModel) -> None:
    @app.exception_handler(Unknown)
    async def unknown(_: Request, error: Unknown) -> JSONResponse:
        close: list[str] = []
        if isinstance(error.given, str):
            # In a thread: it looks at many labels.
            vocabulary = vocabulary_of(model, error.kind)
            close = await run_in_threadpool(vocabulary.close_to, error.given)
        told = {"kind": error.kind, "given": error.given, "suggestions": close}
        return _problem(404, str(error), **told)

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> JSONResponse:
        return _problem(503, str(error))

    @app.exception_handler(KGEError)
    async def refused(_: Request, error: KGEError) -> JSONResponse:
        return _problem(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        # Without what was given: that may be no text that could be written back.
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        return _problem(422, "; ".join(problems[:5]).encode("utf-8", "replace").decode())


def _problem(status: int, detail: str, **more: Any) -> JSONResponse:
    return JSONResponse({"detail": detail, **more}, status)


class SmallBodies:
    """Refuses bodies of more than ``most`` bytes, before they are read as JSON."""

    def __init__(self, app: ASGIApp, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        pieces, size = [], 0
        while True:  # all of it, so that the answer to a large one can be sent
            message = await receive()
            if message["type"] != "http.request":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if size > self.most:
                detail = f"the body has more than {self.most:,} bytes"
                return await _problem(413, detail)(scope, receive, send)
            pieces.append(piece)
            if not message.get("more_body"):
                break
        whole: list[Message] = [{"type": "http.request", "body": b"".join(pieces)}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send)
