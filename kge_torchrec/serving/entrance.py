"""Everything between a client and the endpoints: connections, checks of requests, and counts.

uvicorn limits neither the number of open connections nor how long they may wait: it closes those
that are idle between requests, and its ``limit_concurrency`` counts only requests that have arrived
completely. ASGI middleware checks every request and counts it for Prometheus.
"""

from __future__ import annotations

import asyncio
import re
import resource
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from typing import Any

import h11
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import at_least

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)
OTHER = "other"  # the path label of requests to unknown paths


class Histogram:
    """A cumulative histogram: how many values are at most each bound, and the sum of all values."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, label: str = "") -> Iterator[str]:
        """Yield the samples in text form; ``label`` is one such as ``path="/predict"``."""
        totals = list(accumulate(self._counts))
        for bound, total in zip((*self._bounds, "+Inf"), totals, strict=True):
            yield f'{name}_bucket{{{label}{"," if label else ""}le="{bound}"}} {total}'
        braces = f"{{{label}}}" if label else ""
        yield f"{name}_sum{braces} {self._sum}"
        yield f"{name}_count{braces} {totals[-1]}"


class RequestMetrics:
    """Counts requests by path and status, and measures their duration.

    Unknown paths share one label, so clients cannot create new time series.

    Attributes:
        paths: The paths that the application has, once it has all of them.
    """

    def __init__(self) -> None:
        self.paths: Collection[str] = ()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._seconds: dict[str, Histogram] = {}

    def add(self, path: str, status: str, seconds: float) -> None:
        path = path if path in self.paths else OTHER
        self._requests[path, status] += 1
        self._seconds.setdefault(path, Histogram(SECONDS)).add(seconds)

    def text(self, gauges: Mapping[str, float], batch_sizes: Histogram) -> str:
        """Return all metrics in Prometheus' text format.

        ``gauges`` are more values by name; a name that ends in ``_total`` is a counter.
        """
        lines = ["# TYPE kge_requests_total counter"]
        for (path, status), count in sorted(self._requests.items()):
            lines.append(f'kge_requests_total{{path="{path}",status="{status}"}} {count}')
        lines.append("# TYPE kge_request_seconds histogram")
        for path, seconds in sorted(self._seconds.items()):
            lines += seconds.lines("kge_request_seconds", f'path="{path}"')
        lines.append("# TYPE kge_batch_size histogram")
        lines += batch_sizes.lines("kge_batch_size")
        for name, value in gauges.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"


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
        at_least("the limit of connections", most, 1)
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


# Control characters of terminals and of text direction. A label may contain them.
_CONTROL = re.compile("[\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


class SafeJSON(JSONResponse):
    r"""JSON with control characters escaped as ``\uXXXX``, which every JSON parser reads back."""

    def render(self, content: Any) -> bytes:
        text = super().render(content).decode()
        return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()


def printable(text: str) -> str:
    """Escape the control characters in a text, except line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def problem(status: int, detail: str, **more: Any) -> JSONResponse:
    """Return the reply to a rejected request."""
    return SafeJSON({"detail": printable(detail), **more}, status)


class Entrance:
    """Counts requests, answers HEAD like GET without a body, and rejects unknown hosts.

    The host check stops DNS rebinding: a page of another site cannot read from the server by
    pointing its own host name at this machine. The host "*" allows all.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], metrics: RequestMetrics):
        self.app, self.metrics = app, metrics
        self._hosts = {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), "closed"  # until a reply starts
        without_body = scope["method"] == "HEAD"
        if without_body:
            scope = {**scope, "method": "GET"}

        async def forward(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            elif without_body:
                message = {**message, "body": b""}
            await send(message)

        host = _host(Headers(scope=scope).get("host", ""))
        app = self.app
        if not self._hosts & {host, "*"}:
            hint = f"serve it with `--allow-host {host}` if it should" if host else "name a host"
            app = problem(421, f"this server does not answer for the host {host!r}; {hint}")
        try:
            await app(scope, receive, forward)
        except BaseException:
            status = "500"
            raise
        finally:
            self.metrics.add(scope["path"], status, time.perf_counter() - began)


def _host(header: str) -> str:
    """Return the host name or address of a Host header, without the port."""
    text = header.strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


class SmallBodies:
    """Rejects request bodies of more than ``most`` bytes.

    If the header states the length, the body is not read.
    """

    def __init__(self, app: ASGIApp, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = problem(413, f"the body has more than {self.most:,} bytes")
        stated = Headers(scope=scope).get("content-length", "0")
        if len(stated) > 18 or (stated.isdecimal() and int(stated) > self.most):
            return await refusal(scope, receive, send)  # uvicorn discards the body
        pieces, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if size > self.most:
                return await refusal(scope, receive, send)
            pieces.append(piece)
            if not message.get("more_body"):
                break
        whole: list[Message] = [{"type": "http.request", "body": b"".join(pieces)}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send)
