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
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from kge_torchrec.errors import KGEError
from kge_torchrec.serving.questions import Question, Unknown, ids_of
from kge_torchrec.trained_model import TrainedModel

log = logging.getLogger(__name__)
Waiting = tuple[Question, "asyncio.Future[Any]"]


class Busy(KGEError):
    """Too many queries are waiting."""


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
        """Return the answer to a query, as ``Question.answers`` does.

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
        groups[question.group].append(place)
    ids = ids_of(model, questions)
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


def _answered(
    model: TrainedModel, group: Sequence[Question], ids: dict[tuple[str, str | int], int]
) -> list[Any]:
    """Return the answers to queries of one group; a query with an unknown name gets that error."""
    if facts := getattr(group[0], "facts", ()):
        from kge_torchrec.answers.fold_in import fold_in

        model = fold_in(model, facts)
        ids = ids_of(model, group)

    def error_of(question: Question) -> Unknown | None:
        unknown = (pair for pair in question.names if ids[pair] < 0)
        pairs = (pair for pair in unknown if pair[1] not in question.may_be_unknown)
        return next((Unknown(*pair) for pair in pairs), None)

    errors = [error_of(question) for question in group]
    good = [question for question, error in zip(group, errors, strict=True) if error is None]
    found = iter(group[0].answers(model, good, ids) if good else ())
    return [next(found) if error is None else error for error in errors]
