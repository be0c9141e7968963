"""No client can stop the server, fill a disk, or read from it under another name."""

from __future__ import annotations

import logging
import resource
import socket
import sys
import threading
import time

import pytest
import uvicorn

from kge_torchrec.config import ConfigError
from kge_torchrec.serving import batching
from kge_torchrec.serving.app import Limits, create_app
from kge_torchrec.serving.entrance import Connections
from kge_torchrec.serving.server import LONGEST, RECORDS, CappedLog, listening

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half:"
SECONDS = 0.4


class Server:
    """A server in a thread."""

    def __init__(self, model, most):
        self.connections = Connections(most, SECONDS)
        app = create_app(model, "tiny", Limits(body=10_000), ("localhost",), self.connections)
        config = uvicorn.Config(
            app, http=self.connections.protocol(), ws="none", log_config=None, lifespan="on"
        )
        self.uvicorn = uvicorn.Server(config)

    def __enter__(self):
        self.listener = listening("127.0.0.1", 0)
        self.socket = self.listener.__enter__()
        arguments = {"sockets": [self.socket]}
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs=arguments)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.uvicorn.should_exit = True
        self.thread.join(20)
        self.listener.__exit__(None, None, None)

    def send(self, data):
        client = socket.create_connection(self.socket.getsockname(), timeout=10)
        client.sendall(data)
        return client

    def ask(self, data=HEALTH):
        with self.send(data) as client:
            return rest_of(client)


def rest_of(client):
    """All that the server sends until it ends the connection."""
    pieces = []
    try:
        while piece := client.recv(1 << 16):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def wait_for(condition):
    ends = time.monotonic() + 10
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    assert condition()


@pytest.fixture
def server(model):
    with Server(model, most=8) as server:
        wait_for(lambda: server.uvicorn.started)
        yield server


def test_incomplete_requests_time_out_and_free_connections(server):
    held = [server.send(HALF) for _ in range(40)]
    assert server.ask().startswith(b"HTTP/1.1 200")
    assert server.connections.open <= 9
    began = time.monotonic()
    for client in held:
        with client:
            assert rest_of(client)[:12] in (b"", b"HTTP/1.1 408")
    assert time.monotonic() - began < 10 * SECONDS
    wait_for(lambda: not server.connections.open)
    assert not server.connections.waiting and server.connections.timed_out


def test_slow_trickle_does_not_extend_timeout(server):
    with server.send(HALF) as client:
        began = time.monotonic()
        for _ in range(100):
            try:
                client.sendall(b"x")
            except OSError:
                break
            time.sleep(SECONDS / 8)
        assert time.monotonic() - began < 5 * SECONDS


def test_incomplete_body_times_out(server):
    began = time.monotonic()
    reply = server.ask(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
    assert reply.startswith(b"HTTP/1.1 408") and time.monotonic() - began >= SECONDS * 0.9


def test_unread_replies_close_the_connection(server):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.socket.getsockname())
        client.setblocking(False)
        requests = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
        try:
            while requests and server.connections.open < 2 and not server.connections.timed_out:
                try:
                    requests = requests[client.send(requests) :]
                except BlockingIOError:
                    time.sleep(0.01)
        except ConnectionError:
            pass
        wait_for(lambda: server.connections.timed_out and not server.connections.open)


def test_new_connection_gets_503_while_all_are_busy(model, monkeypatch):
    answered, ours = threading.Event(), batching.answers

    def slowly(*arguments):
        assert answered.wait(10)
        return ours(*arguments)

    monkeypatch.setattr(batching, "answers", slowly)
    request = HEALTH.replace(b"/health", b"/nearest?entity=e1")
    with Server(model, most=2) as server:
        wait_for(lambda: server.uvicorn.started)
        busy = [server.send(request) for _ in range(2)]
        wait_for(lambda: server.connections.open == 2 and not server.connections.waiting)
        reply = server.ask()
        answered.set()
        assert reply[:12] in (b"HTTP/1.1 503", b"") and server.connections.refused == 1
        for client in busy:
            with client:
                assert rest_of(client).startswith(b"HTTP/1.1 200")


def test_connection_limit_fits_open_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert Connections().most == 512
    with pytest.raises(ConfigError, match=r"need 2,000 open files.*at most 512 connections"):
        Connections(1000)
    for wrong in ({"most": 0}, {"seconds": 0.0}, {"seconds": float("nan")}):
        with pytest.raises(ConfigError):
            Connections(**wrong)


def test_large_content_length_is_rejected(server):
    head = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
    with server.send(head) as client:
        began = time.monotonic()
        assert client.recv(1 << 12).startswith(b"HTTP/1.1 413")
        assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("host, status", [
    ("localhost", 200), ("LOCALHOST:8000", 200), ("[::1]:80", 200), ("kg.example.com", 200),
    ("evil.example", 421), ("localhost.evil.example", 421), ("", 421), ("\x1b[2J", 421),
])  # fmt: skip
def test_unknown_hosts_are_rejected(model, host, status):
    from starlette.testclient import TestClient

    app = create_app(model, "tiny", hosts=["localhost", "::1", "KG.example.com"])
    with TestClient(app) as client:
        reply = client.get("/health", headers={"host": host})
        assert reply.status_code == status
        assert "\x1b" not in reply.json().get("detail", "")


def test_head_requests_have_no_body(client):
    for path in ("/health", "/", "/predict?head=e1&relation=r1"):
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(get.content))


def test_metrics_count_requests(model):
    from starlette.testclient import TestClient

    with TestClient(create_app(model, "tiny", connections=Connections(8))) as client:
        for _ in range(3):
            client.get("/nearest", params={"entity": "e1"})
        client.get("/nearest", params={"entity": "nobody"})
        for i in range(5):
            client.get(f"/no{i}")
        reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.text.splitlines()
    for line in (
        'kge_requests_total{path="/nearest",status="200"} 3',
        'kge_requests_total{path="/nearest",status="404"} 1',
        'kge_requests_total{path="other",status="404"} 5',
        'kge_request_seconds_count{path="/nearest"} 4',
        'kge_request_seconds_bucket{path="/nearest",le="+Inf"} 4',
        'kge_batch_size_bucket{le="1"} 4',
        "kge_batch_size_sum 4.0",
        "kge_open_connections 0",
    ):
        assert line in lines
    assert "/no1" not in reply.text


def test_log_is_capped_per_minute(monkeypatch):
    log = CappedLog()
    try:
        raise ValueError("\x1b[2J" + "x" * 10 * LONGEST)
    except ValueError:
        error = sys.exc_info()
    records = [logging.makeLogRecord({"msg": "m %s", "args": ("\u202e",), "exc_info": error})
               for _ in range(10 * RECORDS)]  # fmt: skip
    passed = [record for record in records if log.filter(record)]
    assert len(passed) == RECORDS and "not logged" in passed[-1].getMessage()
    text = logging.Formatter().format(passed[0])
    assert text.startswith(r"m \u202e") and "\x1b" not in text and len(text) < 2 * LONGEST
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert log.filter(logging.makeLogRecord({"msg": "m"}))
