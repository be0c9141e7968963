"""ASGI middleware that checks every request before the application, and the format of replies."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kge_torchrec.serving.metrics import RequestMetrics

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
    pointing its own host name at this machine.

    Args:
        app: The application.
        hosts: Names that the Host header may contain; "*" allows all.
        metrics: Counts the requests.
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
