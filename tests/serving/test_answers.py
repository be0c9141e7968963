"""Answers over HTTP equal those of Python, for one query and for many at once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import asdict, replace

import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kge_torchrec.data.store import Vocabulary
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.serving import batching, server
from kge_torchrec.serving.app import create_app
from kge_torchrec.serving.batching import Answerer, Busy, answers
from kge_torchrec.serving.questions import (
    NearestRequest,
    PredictRequest,
    RecommendRequest,
    ScoreRequest,
    Unknown,
)

N, R, D = 37, 3, 8
PREDICT = [
    {"head": "e3", "relation": "r1"},
    {"tail": "e3", "relation": "r1"},
    {"head": "e3", "tail": "e4"},
]
NEAREST = NearestRequest(entity="e1", k=2)


def tails(head, relation, k, **more):
    return PredictRequest(head=head, relation=relation, k=k, **more)


def ask(client, kind, **body):
    return client.post(f"/{kind}", json=body).json()


@pytest.mark.parametrize("queries", PREDICT)
@pytest.mark.parametrize("known", [True, False])
def test_predict_matches_python(client, model, store, queries, known):
    expected = [asdict(one) for one in model.predict(**queries, k=5, known=known)]
    assert all(0 < one["probability"] < 1 for one in expected)
    assert ask(client, "predict", **queries, k=5, known=known) == {"answers": expected}
    labels = {"head": store.entities, "relation": store.relations, "tail": store.entities}
    ids = {part: int(labels[part].ids([label])[0]) for part, label in queries.items()}
    assert ask(client, "predict", **ids, k=5, known=known) == {"answers": expected}


def test_scores_match_python(client, model, store):
    ids = store.train[:50].tolist()
    of = store.entities, store.relations, store.entities
    triples = [[labels[i] for labels, i in zip(of, triple, strict=True)] for triple in ids]
    for side in ("head", "tail"):
        expected = {"scores": model.score(triples, side)}
        assert ask(client, "score", triples=triples, side=side) == expected
        assert ask(client, "score", triples=ids, side=side) == expected


def test_nearest_matches_python(client, model, store):
    results = ask(client, "nearest", entity="e5", k=4)
    assert results["neighbours"] == [asdict(one) for one in model.nearest("e5", 4)]
    assert results["metric"].startswith("cosine")
    assert ask(client, "nearest", entity=int(store.entities.ids(["e5"])[0]), k=4) == results


def test_labels_and_health_are_served(client, store):
    labels = [label for label in store.entities.array.to_pylist() if label.startswith("e1")]
    for prefix, first, count in (("E1", 0, 3), ("e1", 9, 9)):
        params = {"prefix": prefix, "first": first, "count": count}
        results = client.get("/entities", params=params).json()
        assert results == {"labels": labels[first : first + count], "count": 11}
    results = client.get("/relations", params={"prefix": "r2"}).json()
    assert results == {"labels": ["r2"], "count": 1}
    assert client.get("/entities", params={"prefix": "e" * 5000}).status_code == 422
    results = client.get("/entities", params={"first": 30, "count": 100}).json()
    assert results == {"labels": store.entities.array.to_pylist()[30:], "count": N}
    assert client.get("/relations").json()["labels"] == store.relations.array.to_pylist()
    health = client.get("/health").json()
    assert (health["status"], health["model"], health["scorer"]) == ("ok", "tiny", "complex")
    assert (health["entities"], health["relations"], health["dim"]) == (N, R, D)
    assert health["answered"] >= health["batches"]


def test_labels_of_any_characters_are_served(model):
    labels = ["\u202eevil\x9b2J\x1b", "İstanbul", *(f"e{i}" for i in range(2, N))]
    entities = Vocabulary(pa.array(labels, pa.large_string()), "entity")
    model = replace(model)
    model.entity_labels = entities
    with TestClient(create_app(model, "evil")) as client:
        assert client.get("/entities").json()["labels"] == labels
        for name, close in ((f"{labels[0]}x", labels[0]), ("istanbu", labels[1])):
            assert ask(client, "nearest", entity=name)["suggestions"] == [close]


def test_metrics_count_requests(model):
    with TestClient(create_app(model, "tiny")) as client:
        for _ in range(3):
            ask(client, "nearest", entity="e1")
        ask(client, "nearest", entity="nobody")
        for i in range(5):
            client.get(f"/no{i}")
        lines = client.get("/metrics").text.splitlines()
    for handler, method, status, count in (
        ("/nearest", "POST", 200, 3), ("/nearest", "POST", 404, 1), ("none", "GET", 404, 5),
    ):  # fmt: skip
        labels = f'handler="{handler}",method="{method}",status="{status}"'
        assert f"http_requests_total{{{labels}}} {count}.0" in lines


def test_nonfinite_scores_become_null(model, store):
    rows = model.shard.rows.clone()
    rows[store.entities.ids(["e4"])] = torch.nan
    broken = replace(model, shard=EntityShard(rows, 0, N, replicated=True))
    with TestClient(create_app(broken, "broken")) as client:
        scores = client.post("/score", json={"triples": [["e4", "r0", "e1"], ["e2", "r0", "e1"]]})
        assert scores.json()["scores"][0] is None and scores.json()["scores"][1] is not None
        results = ask(client, "predict", head="e1", relation="r0", k=37)
        last = results["answers"][-1]
        assert last["label"] == "e4" and last["score"] is None


def questions():
    """160 of every kind, with different k, known and sides."""
    for i in range(40):
        parts = [f"e{i % N}", f"r{i % R}", f"e{(7 * i) % N}"]
        query = dict(zip(("head", "relation", "tail"), parts, strict=True))
        triple = [parts[0], i % R, f"e{(3 * i) % N}"]
        del query[[*query][i % 3]]
        yield PredictRequest(**query, k=1 + i % 9, known=i % 4 > 0)
        yield ScoreRequest(triples=[triple] * (1 + i % 3), side=("head", "tail")[i % 2])
        yield NearestRequest(entity=f"e{i % N}", k=1 + i % 5)
        heads = [f"e{i % N}", i // 2][: 1 + i % 2]
        yield RecommendRequest(heads=heads, relation=i % R, k=1 + i % 4, exclude_known=i % 5 > 2)


def test_batched_answers_match_single_answers(model):
    queries = list(questions())
    assert answers(model, queries) == [answers(model, [one])[0] for one in queries]


def test_invalid_query_does_not_affect_others(model):
    good = tails("e1", "r0", 3)
    (expected,) = answers(model, [good])
    of_id = ScoreRequest(triples=[[0, R, 0]])
    first, wrong, of_id, last = answers(model, [good, tails("e1", "nobody", 3), of_id, NEAREST])
    assert first == expected and len(last) == 2
    assert isinstance(wrong, Unknown) and (wrong.kind, wrong.name) == ("relation", "nobody")
    assert isinstance(of_id, Unknown) and (of_id.kind, of_id.name) == ("relation", R)


def test_concurrent_queries_share_few_passes(model):
    queries = [one for one in questions() if isinstance(one, PredictRequest)] * 3
    answerer = Answerer(model, most=64)

    async def ask_all():
        return await asyncio.gather(*map(answerer.ask, queries))

    results = asyncio.run(ask_all())
    assert results == answers(model, queries)
    assert answerer.answered == len(queries) and answerer.batches <= len(queries) // 4


def test_full_queue_raises_busy(model, monkeypatch):
    goes_on = threading.Event()
    ours = batching.answers

    def slowly(*args):
        assert goes_on.wait(10)
        return ours(*args)

    monkeypatch.setattr(batching, "answers", slowly)
    answerer = Answerer(model, most=1, room=2)

    async def ask_all():
        queries = [asyncio.ensure_future(answerer.ask(NEAREST)) for _ in range(9)]
        await asyncio.sleep(0.05)
        goes_on.set()
        return await asyncio.gather(*queries, return_exceptions=True)

    results = asyncio.run(ask_all())
    busy = [one for one in results if isinstance(one, Busy)]
    assert 6 <= len(busy) <= 7 and len(results) - len(busy) >= 2


def test_failed_batch_is_reported_and_next_query_answered(model, monkeypatch):
    app = create_app(model, "tiny")
    with TestClient(app, raise_server_exceptions=False) as client:
        with monkeypatch.context() as patch:
            patch.setattr(batching, "answers", lambda *_: 1 / 0)
            assert client.post("/nearest", json={"entity": "e1"}).status_code == 500
        assert client.post("/nearest", json={"entity": "e1"}).status_code == 200


@pytest.mark.parametrize("options", [{}, {"candidates": "seen"}, {"candidates": "all"}])
@pytest.mark.parametrize("exclude_known", [True, False])
def test_recommend_matches_python(client, model, options, exclude_known):
    body = {"relation": "r1", "k": 5, "exclude_known": exclude_known, **options}
    lists = ask(client, "recommend", heads=["e2", "e1", 5], **body)["lists"]
    assert [(one["head"], one["fallback"]) for one in lists] == [
        ("e2", None), ("e1", None), (5, None)
    ]  # fmt: skip
    for one in lists:
        assert one["answers"] == [asdict(x) for x in model.recommend(one["head"], **body)]
        assert len(one["answers"]) == 5


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    stock=st.lists(st.integers(0, N - 1), min_size=1, max_size=20),
    sold=st.lists(st.integers(0, N - 1), max_size=20),
)
def test_stock_and_excluded_items_are_kept_to(model, stock, sold):
    """Every list is the list of all entities, without those that are not in stock."""
    everything = model.recommend("e1", "r0", N, candidates="all")
    number = {one.label: int(model.entity_ids(one.label)) for one in everything}
    question = RecommendRequest(heads=["e1"], relation="r0", k=N, candidates=stock, exclude=sold)
    (listed,) = answers(model, [question])[0]
    allowed = set(stock) - set(sold)
    assert [one.label for one in listed.answers] == [
        one.label for one in everything if number[one.label] in allowed
    ]
    (rest,) = answers(model, [question.model_copy(update={"candidates": "all"})])[0]
    assert [one.label for one in rest.answers] == [
        one.label for one in everything if number[one.label] not in sold
    ]


def test_many_heads_stock_and_fallback_over_http(client, model, store):
    body = {"heads": ["e1", "nobody", 3], "relation": "r1", "k": 4}
    assert client.post("/recommend", json=body).json()["given"] == "nobody"
    reply = client.post("/recommend", json={**body, "unknown": "popular", "exclude": ["e4"]}).json()
    assert [one["head"] for one in reply["lists"]] == ["e1", "nobody", 3]
    assert [one["fallback"] for one in reply["lists"]] == [None, "popular", None]
    popular = reply["lists"][1]["answers"]
    tails = Counter(store.train[store.train[:, 1] == store.relations.ids(["r1"])[0], 2].tolist())
    del tails[int(store.entities.ids(["e4"])[0])]
    expected = sorted(tails.items(), key=lambda pair: (-pair[1], pair[0]))[:4]
    assert [(int(store.entities.ids([one["label"]])[0]), one["score"]) for one in popular] == (
        expected
    )
    listed = {one["label"] for one in reply["lists"][0]["answers"]}
    assert "e4" not in listed and len(listed) == 4


def test_facts_over_http_are_those_of_python(trained_client):
    client, run = trained_client
    facts = [["new", "r0", "e3"], ["e5", "r1", "new"], ["also", "r0", "e7"]]
    folded = run.fold_in(facts)
    own = [asdict(one) for one in folded.predict("new", "r0", k=5)]
    body = {"head": "new", "relation": "r0", "k": 5, "facts": facts}
    assert client.post("/predict", json=body).json() == {"answers": own}
    reply = client.post(
        "/recommend",
        json={"heads": ["new", "e1", "also"], "relation": "r0", "k": 5, "facts": facts},
    )
    lists = [
        [asdict(one) for one in folded.recommend(head, "r0", 5)] for head in ("new", "e1", "also")
    ]
    assert [one["answers"] for one in reply.json()["lists"]] == lists
    assert client.post("/predict", json={**body, "head": "nobody"}).status_code == 404
    several = [tuple(map(tuple, facts)), (("new", "r2", "e9"),), ()]
    questions = [tails("new", "r0", 5, facts=one) for one in several]
    together = answers(run.model, questions)
    assert together[:2] == [answers(run.model, [one])[0] for one in questions[:2]]
    assert together[0] != together[1] and isinstance(together[2], Unknown)


def test_a_reload_drops_no_request(trained_client, tmp_path):
    """Queries during a reload get an answer of one of the models; a broken one changes nothing."""
    _, run = trained_client
    told, model = [], run.model
    app = create_app(model, "run")
    answerer, path = app.state.answerer, tmp_path / "served"
    path.symlink_to(run.path)
    other = replace(model, shard=EntityShard(model.shard.rows.flip(0), 0, N, replicated=True))
    query = {"head": "e1", "relation": "r1", "k": 3}
    one, two = ([asdict(x) for x in answers(m, [tails(**query)])[0]] for m in (model, other))
    assert one != two
    with TestClient(app) as client:
        ended = threading.Event()

        def swap():
            for _ in range(40):
                answerer.replace(other)
                answerer.replace(model)
            ended.set()

        threading.Thread(target=swap).start()
        replies = []
        while not ended.is_set() or len(replies) < 20:
            replies.append(ask(client, "predict", **query)["answers"])
        assert all(reply in (one, two) for reply in replies)
        before = answerer.loaded
        server.reload(answerer, path, told.append)
        assert answerer.loaded >= before and "reloaded" in told[-1]
        assert ask(client, "predict", **query)["answers"] == one
        path.unlink()
        server.reload(answerer, path, told.append)
        assert "the model before is still served" in told[-1]
        assert ask(client, "predict", **query)["answers"] == one
        assert "was not reloaded" in client.get("/health").json()["problem"]


def test_answers_have_readable_names(model):
    """A label without a name has an empty one; without names, no answer has the field."""
    names = {f"e{i}": f"Entity {i}" for i in range(0, N, 2)}
    app = create_app(model, "tiny", names=names)
    with TestClient(app) as named:
        found = ask(named, "predict", head="e3", relation="r1", k=N)
        near = ask(named, "nearest", entity="e3", k=N)
        (listed,) = ask(named, "recommend", heads=["e3"], relation="r1", k=N)["lists"]
    for rows in (found["answers"], near["neighbours"], listed["answers"]):
        assert [row["name"] for row in rows] == [names.get(row["label"], "") for row in rows]
        assert any(row["name"] for row in rows)
    with TestClient(create_app(model, "tiny")) as plain:
        (best,) = ask(plain, "nearest", entity="e3", k=1)["neighbours"]
    assert "name" not in best
