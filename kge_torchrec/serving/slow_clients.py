"""Ends connections whose request does not arrive in time; uvicorn has no such limit."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0  # for a whole request, headers and body, from the connection or the last reply on


class TimedProtocol(H11Protocol):
    """HTTP of a connection that is closed unless each request is complete within ``SECONDS``."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()

    def connection_lost(self, error: Exception | None) -> None:
        if self._due is not None:
            self._due.cancel()
        super().connection_lost(error)

    def _wait_for_request(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = self.loop.call_later(SECONDS, self._end_if_incomplete)

    def _end_if_incomplete(self) -> None:
        is_answered = self.cycle is not None and not self.cycle.response_complete
        if not (is_answered and not self.cycle.more_body):
            self.transport.abort()
