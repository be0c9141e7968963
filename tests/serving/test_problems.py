"""Nothing that is sent gets a 500, and each refusal says what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from training_runs import config_of, tiny_store

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.serving import slow_clients
from kge_torchrec.serving.app import create_app
from kge_torchrec.serving.server import serve


def test_unknown_label_gets_404_with_suggestions(client):
    reply = client.post("/predict", json={"head": "E7", "relation": "r1"})
    assert reply.status_code == 404
    assert reply.json() == {
        "detail": "unknown entity 'E7'",
        "kind": "entity",
        "given": "E7",
        "suggestions": reply.json()["suggestions"],
    }
    assert reply.json()["suggestions"][0] == "e7"
    assert client.post("/nearest", json={"entity": 37}).json()["detail"] == "unknown entity 37"
    assert client.post("/predict", json={"head": 1, "relation": 3}).json()["kind"] == "relation"


def test_a_number_as_text_is_a_label(client):
    for path, body in (("predict", {"head": 3, "relation": "r1"}), ("nearest", {"entity": 3})):
        assert client.post(f"/{path}", json=body).status_code == 200
        text = {name: str(value) for name, value in body.items()}
        assert client.post(f"/{path}", json=text).json()["detail"] == "unknown entity '3'"


BAD = [
    ("/predict", {"head": "e1"}, "send two of head, relation and tail"),
    ("/predict", {"head": "e1", "relation": "r1", "tail": "e2"}, "send two of"),
    ("/predict", {"head": "e1", "relation": "r1", "k": 0}, "k: Input should be greater"),
    ("/predict", {"head": "e1", "relation": "r1", "k": 21}, "k must be at most 20 here, got 21"),
    ("/predict", {"head": "e1", "relation": "r1", "K": 3}, "K is not a field of this request"),
    ("/predict", {"head": True, "relation": "r1"}, "head must be a label"),
    ("/predict", {"head": 10**30, "relation": "r1"}, "head must be a label"),
    (
        "/predict",
        {"head": "e" * 5000, "relation": "r1"},
        "label of at most 4096 characters",
    ),
    ("/score", {"triples": []}, "triples: "),
    ("/score", {"triples": [["e1", "r1"]]}, "triples.0"),
    ("/score", {"triples": [["e1", "r1", "e2"]], "side": "left"}, "side: "),
    ("/recommend", {"relation": "r1"}, "heads is missing"),
    ("/recommend", {"relation": "r1", "heads": ["e1"], "candidates": "some"}, "candidates"),
    ("/recommend", {"relation": "r1", "heads": ["e1"] * 1001}, "at most 1000"),
    ("/recommend", {"relation": "r1", "heads": ["x"], "facts": [["x", "r1", "y"]]}, "neither 'x'"),
    ("/recommend", {"relation": "r1", "heads": ["x"], "facts": [["x", "r1"]]}, "facts.0"),
    ("/nearest", {}, "entity is missing"),
    ("/nearest", [1], "must be a JSON object"),
]


@pytest.mark.parametrize("path, body, words", BAD)
def test_invalid_requests_get_422(client, path, body, words):
    reply = client.post(path, json=body)
    assert reply.status_code == 422 and words in reply.json()["detail"]


RAW = [b"", b"{", b"null", b"\xff\xfe", b'{"entity": "\\ud800"}', b'{"entity": NaN}',
       b"[" * 5000, b'{"entity": ' + b"9" * 5000 + b"}", b'{"entity": "\\u0000"}']  # fmt: skip


@pytest.mark.parametrize("body", RAW, ids=range(len(RAW)))
def test_malformed_bodies_are_rejected(client, body):
    reply = client.post("/nearest", content=body, headers={"content-type": "application/json"})
    assert 400 <= reply.status_code < 500 and reply.json()["detail"]


def test_large_bodies_are_rejected_before_json_parsing(client):
    many = {"triples": [["e1", "r1", "e2"]] * 1000}
    assert client.post("/score", json=many).status_code == 413
    pieces = (b" " * 4000 for _ in range(100))  # of no stated length
    assert client.post("/score", content=pieces).status_code == 413


@pytest.mark.parametrize("host, status", [
    ("localhost", 200), ("LOCALHOST:8000", 200), ("[::1]:80", 200), ("kg.example.com", 200),
    ("evil.example", 400), ("localhost.evil.example", 400), ("", 400), ("\x1b[2J", 400),
])  # fmt: skip
def test_unknown_hosts_are_rejected(model, host, status):
    app = create_app(model, "tiny", hosts=["localhost", "::1", "KG.example.com"])
    with TestClient(app) as client:
        assert client.get("/health", headers={"host": host}).status_code == status


@pytest.mark.parametrize("path", ["/predict", "/score", "/nearest", "/health", "/", "/entities"])
def test_server_is_read_only(client, path):
    for method in ("PUT", "DELETE", "PATCH"):
        assert client.request(method, path).status_code == 405


def test_page_isolates_labels_and_loads_nothing_from_other_servers(model):
    client = TestClient(create_app(model, "kg & <i>", 77))
    reply = client.get("/")
    for words in ('element("bdi"', '"probability"', "prefix }", "max-width: 30rem", "scheme: dark",
                  "<h1>kg &amp; &lt;i&gt;</h1>", "complex, dim 8: 37 entities, 3 relations",
                  model.scorer.formula, 'max="77"', "new ones only"):  # fmt: skip
        assert words in reply.text
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.findall(r"https?://|src=|@import|url\(", reply.text)
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {*PLACES[:6], "/recommend"}


# Requests from the OpenAPI: its addresses and names, with arbitrary values.
NAMES = ["head", "relation", "tail", "k", "known", "triples", "side", "entity", "first", "count"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from(["e1", "r1", "tail", 3, 2**63, -1, "\ud800", "\x00"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
BODIES = st.one_of(
    st.binary(max_size=50),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5).map(
        lambda value: json.dumps(value).encode()
    ),
)
PLACES = ["/predict", "/score", "/nearest", "/entities", "/relations", "/health", "/no"]
QUERIES = st.lists(
    st.tuples(st.sampled_from(NAMES) | st.text(max_size=3), VALUES.map(str)), max_size=4
)
TYPES = st.sampled_from(["application/json", "text/plain", "multipart/form-data", "", "a/b;c=d"])


METHODS = st.sampled_from(["GET", "POST", "POST", "HEAD", "PUT", "OPTIONS"])
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=40, suppress_health_check=FIXTURES)
@given(METHODS, st.sampled_from(PLACES), QUERIES, BODIES, TYPES)
def test_random_requests_never_get_500(client, method, path, query, body, kind):
    encoded = [(k.encode("utf-8", "replace"), v.encode("utf-8", "replace")) for k, v in query]
    reply = client.request(
        method, path, params=encoded, content=body, headers={"content-type": kind}
    )
    assert reply.status_code < 500, reply.text


# The verb


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    config = config_of(tiny_store(folder / "store").path, folder / "run", train__epochs=1)
    with api.train(config) as run:
        run.export(folder / "export")
    return folder / "run"


def test_runs_and_exports_are_served(run_path, monkeypatch):
    replies = []

    def ask(server, sockets):
        with TestClient(server.config.app, "http://localhost") as client:
            replies.append((client.get("/health").json(), sockets[0].getsockname()))
        assert sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    monkeypatch.setattr(uvicorn.Server, "run", ask)
    messages = []
    for name in ("run", "export"):
        serve(run_path.with_name(name), port=0, max_k=7, tell=messages.append)
    (of_run, address), (of_export, _) = replies
    assert of_run["max_k"] == of_export["max_k"] == 7
    assert (of_run["model"], of_export["model"]) == ("run", "export")
    assert f"http://127.0.0.1:{address[1]} " in messages[0]


def test_unusable_folders_are_rejected(run_path, tmp_path, capsys, monkeypatch):
    def refused(*arguments):
        assert main(["serve", *map(str, arguments)]) == 1
        return capsys.readouterr().err

    assert "is no run folder" in refused(tmp_path)
    assert "port must lie in" in refused(run_path, "--port", 70000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Address already in use" in refused(run_path, "--port", taken.getsockname()[1])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Exception, match="without torchrun"):
        serve(run_path)


@pytest.fixture
def timed(model, monkeypatch):
    """The port of a server that waits for .2 s for a request."""
    monkeypatch.setattr(slow_clients, "SECONDS", 0.2)
    app = create_app(model, "tiny")

    @app.get("/slowly")
    async def slowly() -> str:
        await asyncio.sleep(0.5)
        return "done"

    config = uvicorn.Config(
        app, http=slow_clients.TimedProtocol, log_level="warning", timeout_keep_alive=5
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(10)


HEAD = (
    b"POST /nearest HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 16\r\n"
)
WHOLE = HEAD + b'\r\n{"entity": "e1"}'


@pytest.mark.parametrize(
    "sent", [b"", HEAD, HEAD + b"\r\n{", WHOLE + HEAD], ids=["nothing", "head", "body", "second"]
)
def test_slow_clients_are_ended(timed, sent):
    """Also those that send a byte now and then."""
    with socket.create_connection(("127.0.0.1", timed), timeout=5) as client:
        client.sendall(sent)
        start, received = time.monotonic(), b""
        client.settimeout(0.05)
        while time.monotonic() - start < 5:
            try:
                part = client.recv(1 << 16)
                received += part
                if not part:
                    break
            except TimeoutError:
                client.sendall(b"x") if sent != WHOLE + HEAD else None
            except ConnectionError:
                break
        assert 0.1 < time.monotonic() - start < 2
        assert received.startswith(b"HTTP/1.1 200") is (sent == WHOLE + HEAD)


def test_a_slow_answer_is_waited_for(timed):
    with socket.create_connection(("127.0.0.1", timed), timeout=5) as client:
        for _ in range(2):
            client.sendall(b"GET /slowly HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while b"done" not in received:
                part = client.recv(1 << 16)
                assert part
                received += part


@pytest.mark.slow
def test_server_stops_on_interrupt(run_path):
    command = [sys.executable, "-m", "kge_torchrec", "serve", run_path, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        line = server.stdout.readline()
        address = re.search(r"http://\S+", line)[0]
        import httpx

        for _ in range(100):
            try:
                health = httpx.get(f"{address}/health")
                break
            except httpx.TransportError:
                pass
        assert health.json()["status"] == "ok"
        os.kill(server.pid, signal.SIGHUP)
        assert "reloaded" in server.stdout.readline()
        assert httpx.get(f"{address}/health").json()["loaded"] >= health.json()["loaded"]
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(20) == 0
