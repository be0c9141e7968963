"""Batches queries: those that arrive during a pass wait and are answered together in the next one.

A pass over all entities costs nearly the same for 64 queries as for one. An idle server answers
at once and never waits for a batch to fill.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

from kge_torchrec.errors import KGEError
from kge_torchrec.serving.questions import Question, answers
from kge_torchrec.trained_model import TrainedModel


class Busy(KGEError):
    """Too many queries are waiting."""


class Answerer:
    """Answers queries in batches of at most ``most``, in a thread; ``room`` queries may wait.

    ``model`` may be replaced at any time: a batch that has begun finishes with the model before.
    """

    def __init__(self, model: TrainedModel, most: int = 64, room: int = 1024):
        self.model, self.most, self.room = model, most, room
        self.batches = self.answered = 0
        self.loaded = datetime.now(timezone.utc)
        self.problem: str | None = None  # why a newer model is not used
        self._waiting: list[tuple[Question, asyncio.Future[Any]]] = []
        self._work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "answers")

    def replace(self, model: TrainedModel) -> None:
        """Answer with another model from the next batch on."""
        self.model, self.loaded, self.problem = model, datetime.now(timezone.utc), None

    async def ask(self, question: Question) -> Any:
        """Return the answer to a query, as ``Question.answers`` does.

        Raises:
            Busy: Too many queries are waiting.
            Unknown: The model does not have a label or id.
            KGEError: The model cannot answer the query.
        """
        if len(self._waiting) >= self.room:
            raise Busy(f"{self.room} queries are waiting already; try again in a moment")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((question, future))
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._answer_all(loop))
        return await future

    async def _answer_all(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self.most], self._waiting[self.most :]
            questions = [question for question, _ in batch]
            try:
                results = await loop.run_in_executor(self._thread, answers, self.model, questions)
            except Exception as error:  # it goes to the clients, and the next batch is answered
                results = [error] * len(batch)
            self.batches, self.answered = self.batches + 1, self.answered + len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # the client has disconnected
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
