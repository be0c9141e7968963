"""Limits that uvicorn does not have: the number of open connections, and how long they may wait.

uvicorn itself closes connections that are idle between requests. Its ``limit_concurrency`` counts
only requests that have arrived completely.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kge_torchrec.config import ConfigError

DEFAULT_CONNECTIONS = 1000
_REFUSAL = b'{"detail":"too many connections; try again in a moment"}'
_REPLIES = {
    503: b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
    % (len(_REFUSAL), _REFUSAL),
    408: b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
}


class Connections:
    """The open connections of a server.

    Args:
        most: Connections that may be open. None: 1,000, or half of the process's limit of open
            files if that is less.
        seconds: The time within which a request must arrive, and within which the client must
            read a reply.

    Raises:
        ConfigError: ``most`` exceeds the limit of open files, or an argument is out of range.
    """

    def __init__(self, most: int | None = None, seconds: float = 20.0):
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Use half: the system accepts connections in groups, before they can be counted.
        possible = DEFAULT_CONNECTIONS if files == resource.RLIM_INFINITY else files // 2
        if most is not None and not most >= 1:
            raise ConfigError(f"the limit of connections must be an integer >= 1, got {most}")
        if most is not None and files != resource.RLIM_INFINITY and most > possible:
            raise ConfigError(
                f"{most:,} connections need {2 * most:,} open files, and this process may have "
                f"{files:,}. Raise `ulimit -n`, or allow at most {possible:,} connections"
            )
        if not seconds > 0:
            raise ConfigError(f"the timeout must be above 0 seconds, got {seconds}")
        self.most = min(DEFAULT_CONNECTIONS, possible) if most is None else most
        self.seconds = seconds
        self.open = self.refused = self.timed_out = 0
        # Connections without a complete request and their timers, oldest first.
        self.waiting: dict[LimitedConnection, asyncio.TimerHandle] = {}

    @property
    def backlog(self) -> int:
        """The number of connections that asyncio accepts at once, before it counts one."""
        return max(8, min(256, self.most // 8))

    def protocol(self) -> type[LimitedConnection]:
        """Return the connection class for uvicorn."""
        return type("Connection", (LimitedConnection,), {"shared": self})


class LimitedConnection(H11Protocol):
    """A connection that is closed if its client is too slow.

    Above the limit, a new connection replaces the one that has waited longest for the rest of its
    request. If none is waiting, the new connection gets 503.
    """

    shared: Connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._unread: asyncio.TimerHandle | None = None
        self.shared.open += 1
        transport.set_write_buffer_limits(high=0)  # pause_writing is called while data is unread
        if self.shared.open > self.shared.most:
            self.shared.refused += 1
            if not self.shared.waiting:
                transport.write(_REPLIES[503])
                return transport.close()
            next(iter(self.shared.waiting))._give_up()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.open -= 1
        self._stop_watching()
        self._stop_unread()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_unread()
        self._unread = self.loop.call_later(self.shared.seconds, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def _watch(self) -> None:
        """Run the timer while the client still has to send a request or the rest of one."""
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not incomplete or self.transport.is_closing():
            self._stop_watching()
        elif self not in self.shared.waiting:
            timer = self.loop.call_later(self.shared.seconds, self._too_late)
            self.shared.waiting[self] = timer

    def _stop_watching(self) -> None:
        if timer := self.shared.waiting.pop(self, None):
            timer.cancel()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_late(self) -> None:
        self.shared.timed_out += 1
        self._give_up()

    def _abort(self) -> None:
        self.shared.timed_out += 1
        self.transport.abort()

    def _give_up(self) -> None:
        self._stop_watching()
        begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # no reply has begun
            self.transport.write(_REPLIES[408])
        self.transport.close()
