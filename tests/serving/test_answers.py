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

from kge_torchrec.answers.calibration import Calibration, Curve
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.serving import batching, server
from kge_torchrec.serving.app import Scored, create_app
from kge_torchrec.serving.batching import (
    Answerer,
    Busy,
    Nearest,
    Predict,
    Recommend,
    Score,
    Unknown,
    answers,
)

N, R, D = 37, 3, 8
PREDICT = [
    {"head": "e3", "relation": "r1"},
    {"tail": "e3", "relation": "r1"},
    {"head": "e3", "tail": "e4"},
]


@pytest.mark.parametrize("queries", PREDICT)
@pytest.mark.parametrize("known", [True, False])
def test_predict_matches_python(client, python, store, queries, known):
    expected = [asdict(one) for one in python.predict(**queries, k=5, known=known)]
    by_address = client.get("/predict", params={**queries, "k": 5, "known": known})
    by_body = client.post("/predict", json={**queries, "k": 5, "known": known})
    assert by_address.json() == by_body.json() == {"answers": expected}
    labels = {"head": store.entities, "relation": store.relations, "tail": store.entities}
    ids = {part: int(labels[part].ids([label])[0]) for part, label in queries.items()}
    assert client.post("/predict", json={**ids, "k": 5, "known": known}).json() == by_body.json()


def test_known_answers_are_marked(client, store):
    splits = {}
    for head, relation, _ in store.train[:20].tolist():
        body = {"head": head, "relation": relation, "k": 20}
        for answer in client.post("/predict", json=body).json()["answers"]:
            splits[head, relation, store.entities.find([answer["label"]])[0]] = answer["known"]
    held = {tuple(triple) for triple in store.train.tolist()}
    assert {triple for triple, split in splits.items() if split == "train"} == held & splits.keys()
    assert held & splits.keys()


def test_scores_match_python(client, python, store):
    entities, relations = (x.array.to_pylist() for x in (store.entities, store.relations))
    triples = [
        [entities[head], relations[relation], entities[tail]]
        for head, relation, tail in store.train[:50].tolist()
    ]
    for side in ("head", "tail"):
        results = client.post("/score", json={"triples": triples, "side": side}).json()
        assert results == {"scores": python.score(triples, side)}
        queries = dict(zip(("head", "relation", "tail"), triples[7], strict=True))
        one = client.get("/score", params={**queries, "side": side}).json()
        assert one["scores"] == results["scores"][7:8]
    ids = store.train[:50].tolist()
    assert client.post("/score", json={"triples": ids}).json() == {"scores": python.score(triples)}


def test_nearest_matches_python(client, python, store):
    expected = [asdict(one) for one in python.nearest("e5", 4)]
    results = client.get("/nearest", params={"entity": "e5", "k": 4}).json()
    assert results["neighbours"] == expected and results["metric"].startswith("cosine")
    body = {"entity": int(store.entities.ids(["e5"])[0]), "k": 4}
    assert client.post("/nearest", json=body).json() == results


def test_labels_and_health_are_served(client, store):
    results = client.get("/entities", params={"first": 30, "count": 100}).json()
    assert results == {"labels": store.entities.array.to_pylist()[30:], "count": N}
    assert client.get("/relations").json()["labels"] == store.relations.array.to_pylist()
    health = client.get("/health").json()
    assert (health["status"], health["model"], health["scorer"]) == ("ok", "tiny", "complex")
    assert (health["entities"], health["relations"], health["dim"]) == (N, R, D)
    assert health["answered"] >= health["batches"]


def test_labels_with_a_prefix_are_served(client, store):
    labels = [label for label in store.entities.array.to_pylist() if label.startswith("e1")]
    results = client.get("/entities", params={"prefix": "E1", "count": 3}).json()
    assert results == {"labels": labels[:3], "count": 11}
    second = client.get("/entities", params={"prefix": "e1", "first": 9, "count": 9}).json()
    assert second == {"labels": labels[9:], "count": 11}
    results = client.get("/relations", params={"prefix": "r2"}).json()
    assert results == {"labels": ["r2"], "count": 1}
    assert client.get("/entities", params={"prefix": "e" * 5000}).status_code == 422


def test_labels_of_any_characters_are_served(model):
    labels = ["\u202eevil\x9b2J\x1b", "İstanbul", *(f"e{i}" for i in range(2, N))]
    entities = Vocabulary(pa.array(labels, pa.large_string()), "entity")
    model = replace(model)
    model.entity_labels = entities
    with TestClient(create_app(model, "evil")) as client:
        assert client.get("/entities").json()["labels"] == labels
        unknown = client.get("/nearest", params={"entity": f"{labels[0]}x"})
        assert unknown.json()["suggestions"] == [labels[0]]
        assert client.get("/nearest", params={"entity": "istanbu"}).json()["suggestions"] == [
            labels[1]
        ]


def test_calibrated_probabilities_are_served(model):
    calibration = Calibration({"tail": Curve(2.0)}, {}, 1, "", {})
    calibrated = replace(model, calibration=calibration)
    with TestClient(create_app(calibrated, "tiny")) as client:
        results = client.get("/predict", params={"head": "e1", "relation": "r1"}).json()["answers"]
        assert all(0 < one["probability"] < 1 for one in results)


def test_metrics_count_requests(model):
    with TestClient(create_app(model, "tiny")) as client:
        for _ in range(3):
            client.get("/nearest", params={"entity": "e1"})
        client.get("/nearest", params={"entity": "nobody"})
        for i in range(5):
            client.get(f"/no{i}")
        lines = client.get("/metrics").text.splitlines()
    for handler, status, count in (("/nearest", 200, 3), ("/nearest", 404, 1), ("none", 404, 5)):
        labels = f'handler="{handler}",method="GET",status="{status}"'
        assert f"http_requests_total{{{labels}}} {count}.0" in lines


def test_nonfinite_scores_become_null(model, store):
    rows = model.shard.rows.clone()
    rows[store.entities.ids(["e4"])] = torch.nan
    broken = replace(model, shard=EntityShard(rows, 0, N, replicated=True))
    with TestClient(create_app(broken, "broken")) as client:
        scores = client.post("/score", json={"triples": [["e4", "r0", "e1"], ["e2", "r0", "e1"]]})
        assert scores.json()["scores"][0] is None and scores.json()["scores"][1] is not None
        results = client.get("/predict", params={"head": "e1", "relation": "r0", "k": 37}).json()
        last = results["answers"][-1]
        assert last["label"] == "e4" and last["score"] is None
    # The code that turns the answer into JSON, in all versions of FastAPI.
    assert Scored(rank=1, label="e4", score=-torch.inf).score is None


def questions():
    """120 of every kind, with different k, known and sides."""
    for i in range(40):
        query = [f"e{i % N}", f"r{i % R}", f"e{(7 * i) % N}"]
        query[i % 3] = None
        yield Predict(tuple(query), 1 + i % 9, i % 4 > 0)
        yield Score(((f"e{i % N}", i % R, f"e{(3 * i) % N}"),) * (i % 3), ("head", "tail")[i % 2])
        yield Nearest(f"e{i % N}", 1 + i % 5)


def test_batched_answers_match_single_answers(model):
    queries = list(questions())
    assert answers(model, queries) == [answers(model, [one])[0] for one in queries]


def test_invalid_query_does_not_affect_others(model):
    good = Predict(("e1", "r0", None), 3, True)
    bad = Predict(("e1", "nobody", None), 3, True)
    (expected,) = answers(model, [good])
    first, wrong, of_id, last = answers(
        model, [good, bad, Score(((0, R, 0),), "tail"), Nearest("e1", 2)]
    )
    assert first == expected and len(last) == 2
    assert isinstance(wrong, Unknown) and (wrong.kind, wrong.name) == ("relation", "nobody")
    assert isinstance(of_id, Unknown) and (of_id.kind, of_id.name) == ("relation", R)


def test_concurrent_queries_share_few_passes(model):
    queries = [one for one in questions() if isinstance(one, Predict)] * 3
    answerer = Answerer(model, most=64)

    async def ask_all():
        return await asyncio.gather(*map(answerer.ask, queries))

    results = asyncio.run(ask_all())
    answerer.close()
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
        queries = [asyncio.ensure_future(answerer.ask(Nearest("e1", 2))) for _ in range(9)]
        await asyncio.sleep(0.05)
        goes_on.set()
        return await asyncio.gather(*queries, return_exceptions=True)

    results = asyncio.run(ask_all())
    answerer.close()
    busy = [one for one in results if isinstance(one, Busy)]
    assert 6 <= len(busy) <= 7 and len(results) - len(busy) >= 2


def test_failed_batch_is_reported_and_next_query_answered(model, monkeypatch):
    app = create_app(model, "tiny")
    with TestClient(app, raise_server_exceptions=False) as client:
        with monkeypatch.context() as patch:
            patch.setattr(batching, "answers", lambda *_: 1 / 0)
            assert client.get("/nearest", params={"entity": "e1"}).status_code == 500
        assert client.get("/nearest", params={"entity": "e1"}).status_code == 200


@pytest.mark.parametrize("candidates", [None, "seen", "all"])
@pytest.mark.parametrize("exclude_known", [True, False])
def test_recommend_matches_python(client, python, candidates, exclude_known):
    body = {"head": "e3", "relation": "r1", "k": 5, "exclude_known": exclude_known}
    options = {} if candidates is None else {"candidates": candidates}
    expected = [asdict(one) for one in python.recommend(**body, **options)]
    reply = client.get("/recommend", params=body | options)
    assert reply.json() == client.post("/recommend", json=body | options).json()
    assert reply.json() == {"answers": expected, "head": "e3", "fallback": None}
    assert len(expected) == 5


def test_many_recommendations_have_those_of_each(model):
    questions = [
        Recommend(("e1",), "r0", 3),
        Recommend(("e2", "e1", 5), 1, 4),
        Recommend(("e1",), "r0", 3, True, "all"),
        Recommend(("e9x",), 0, 1, True),
    ]
    results = answers(model, questions)
    assert [one.answers for one in results[0]] == [model.recommend("e1", "r0", 3)]
    expected = [model.recommend(head, "r1", 4) for head in ("e2", "e1", 5)]
    assert [one.answers for one in results[1]] == expected
    assert results[2][0].answers == model.recommend(
        "e1", "r0", 3, exclude_known=True, candidates="all"
    )
    assert isinstance(results[3], Unknown)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    stock=st.lists(st.integers(0, N - 1), min_size=1, max_size=20),
    sold=st.lists(st.integers(0, N - 1), max_size=20),
)
def test_stock_and_excluded_items_are_kept_to(model, stock, sold):
    """Every list is the list of all entities, without those that are not in stock."""
    everything = model.recommend("e1", "r0", N, candidates="all")
    number = {one.label: int(model.entity_ids(one.label)) for one in everything}
    question = Recommend(("e1",), "r0", N, False, tuple(stock), tuple(sold))
    (listed,) = answers(model, [question])[0]
    allowed = set(stock) - set(sold)
    assert [one.label for one in listed.answers] == [
        one.label for one in everything if number[one.label] in allowed
    ]
    (rest,) = answers(model, [replace(question, candidates="all")])[0]
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
    own = [asdict(one) for one in run.predict("new", "r0", k=5, facts=facts)]
    body = {"head": "new", "relation": "r0", "k": 5, "facts": facts}
    assert client.post("/predict", json=body).json() == {"answers": own}
    reply = client.post(
        "/recommend",
        json={"heads": ["new", "e1", "also"], "relation": "r0", "k": 5, "facts": facts},
    )
    lists = [
        [asdict(one) for one in run.recommend(head, "r0", 5, facts=given)]
        for head, given in (("new", facts), ("e1", None), ("also", facts[2:]))
    ]
    assert [one["answers"] for one in reply.json()["lists"]] == lists
    assert client.post("/predict", json={**body, "head": "nobody"}).status_code == 404
    several = [tuple(map(tuple, facts)), (("new", "r2", "e9"),), ()]
    questions = [Predict(("new", "r0", None), 5, True, one) for one in several]
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
    one, two = ([asdict(x) for x in predictions_of(m)] for m in (model, other))
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
            replies.append(client.get("/predict", params=query).json()["answers"])
        assert all(reply in (one, two) for reply in replies)
        before = answerer.loaded
        server.reload(answerer, path, told.append)
        assert answerer.loaded >= before and "reloaded" in told[-1]
        assert client.get("/predict", params=query).json()["answers"] == one
        path.unlink()
        server.reload(answerer, path, told.append)
        assert "the model before is still served" in told[-1]
        assert client.get("/predict", params=query).json()["answers"] == one
        assert "was not reloaded" in client.get("/health").json()["problem"]


def predictions_of(model):
    return batching.answers(model, [Predict(("e1", "r1", None), 3, True)])[0]


def test_answers_have_readable_names(model):
    """A label without a name has an empty one; without names, no answer has the field."""
    names = {f"e{i}": f"Entity {i}" for i in range(0, N, 2)}
    app = create_app(model, "tiny", names=names)
    with TestClient(app) as named:
        found = named.get("/predict", params={"head": "e3", "relation": "r1", "k": N}).json()
        near = named.get("/nearest", params={"entity": "e3", "k": N}).json()
        tails = named.get("/recommend", params={"head": "e3", "relation": "r1", "k": N}).json()
    for rows in (found["answers"], near["neighbours"], tails["answers"]):
        assert [row["name"] for row in rows] == [names.get(row["label"], "") for row in rows]
        assert any(row["name"] for row in rows)
    with TestClient(create_app(model, "tiny")) as plain:
        (best,) = plain.get("/nearest", params={"entity": "e3", "k": 1}).json()["neighbours"]
    assert "name" not in best
