"""Checks that every request passes before the application sees it, and the form of replies."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kge_torchrec.serving.metrics import RequestMetrics

# What terminals obey and what changes the direction of the text around it. A label may hold them.
_CONTROL = re.compile("[\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


class SafeJSON(JSONResponse):
    """JSON with control characters as ``\\uXXXX``: every parser reads the same text from it."""

    def render(self, content: Any) -> bytes:
        text = super().render(content).decode()
        return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()


def printable(text: str) -> str:
    """Return the text with escapes in place of control characters other than line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def problem(status: int, detail: str, **more: Any) -> JSONResponse:
    """Return the reply to a request that is refused."""
    return SafeJSON({"detail": printable(detail), **more}, status)


class Entrance:
    """Counts requests, answers HEAD as GET without a body, and refuses other hosts' requests.

    hosts: names that the Host header may hold; "*" allows every one. A page of another site whose
    name somebody pointed at this machine (DNS rebinding) so cannot read from the server.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], metrics: RequestMetrics):
        self.app, self.metrics = app, metrics
        self._hosts = {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), "closed"  # unless a reply is sent
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
    """Return the name or the address in a Host header, without its port."""
    text = header.strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


class SmallBodies:
    """Refuses bodies of more than ``most`` bytes, from their stated length where there is one."""

    def __init__(self, app: ASGIApp, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = problem(413, f"the body has more than {self.most:,} bytes")
        stated = Headers(scope=scope).get("content-length", "0")
        if len(stated) > 18 or (stated.isdecimal() and int(stated) > self.most):
            return await refusal(scope, receive, send)  # the server throws the body away
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
