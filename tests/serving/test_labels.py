"""Completions and suggestions of labels, and labels with control characters."""

from __future__ import annotations

import difflib
import random
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from kge_torchrec.answers.calibration import Calibration, Curve
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.serving import label_index
from kge_torchrec.serving.app import create_app
from kge_torchrec.serving.label_index import LabelIndex


def labels_of(count):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdeäöß", k=draw.randint(2, 6))) for _ in range(200)]
    return [f"{draw.choice(words).title()} {draw.choice(words)} {i}" for i in range(count)]


@pytest.fixture(scope="module")
def labels():
    return [*labels_of(5000), "\u202eevil", "İstanbul", "日本", "x" * 5000, "X" * 5000 + "y"]


@pytest.fixture(scope="module")
def index(labels):
    return LabelIndex(pa.array(labels, pa.large_string()))


@pytest.mark.parametrize(
    "text", ["a", "A", "ÄÖ", "ß", "ab", "\u202e", "日", "xx", "nobody", "\U0010ffff"]
)
def test_prefix_lookup_matches_brute_force(index, labels, text):
    expected = {label for label in labels if label.lower().startswith(text.lower())}
    results, count = index.beginning_with(text, 0, 1000)
    assert set(results) <= expected and len(set(results)) == min(1000, count) == len(results)
    assert count == len(expected)
    assert [label.lower()[:200] for label in results] == sorted(x.lower()[:200] for x in results)
    assert index.beginning_with(text, 2, 3)[0] == results[2:5]


def test_close_labels_forgive_typing_errors(index, labels):
    missed = 0
    for place, label in enumerate(labels[:300]):
        i = place % (len(label) - 1)
        wrong = [
            label[:i] + label[i + 1 :],
            label[:i] + label[i + 1] + label[i] + label[i + 2 :],
            label[:i] + "q" + label[i:],
            label[:i] + "q" + label[i + 1 :],
            label.upper(),
        ][place % 5]
        missed += label not in index.close_to(wrong)
    assert missed <= 3
    assert index.close_to("") == index.close_to("x" * 201) == []
    assert index.close_to("İstanbu") == ["İstanbul"]


def test_number_of_suggestions_is_bounded(monkeypatch):
    index = LabelIndex(pa.array([f"the same {i:06d}" for i in range(20_000)], pa.large_string()))
    compared, ours = [], difflib.get_close_matches

    def counted(label, candidates):
        compared.append(len(candidates))
        return ours(label, candidates)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    assert "the same 004711" in index.close_to("the saem 004711")
    assert compared[0] <= 600


def test_unsorted_labels_raise_busy(model, monkeypatch):
    monkeypatch.setattr(LabelIndex, "_sort", lambda _: None)
    with TestClient(create_app(model, "tiny")) as client:
        assert client.get("/entities", params={"prefix": "e"}).status_code == 503
        assert client.get("/entities").status_code == 200
        results = client.get("/nearest", params={"entity": "E7"})
        assert (results.status_code, results.json()["suggestions"]) == (404, [])


def test_completions_are_served(client):
    results = client.get("/entities", params={"prefix": "E1", "count": 3}).json()
    assert results == {"labels": ["e1", "e10", "e11"], "count": 11}
    assert client.get("/relations", params={"prefix": "r2"}).json() == {
        "labels": ["r2"],
        "count": 1,
    }
    assert client.get("/entities", params={"prefix": "e" * 201}).status_code == 422
    assert label_index.COMPARED == 200


def test_control_characters_in_labels_are_escaped(model):
    evil = "\u202eevil\x9b2J\x1b"
    entities = [evil, *(f"e{i}" for i in range(1, 37))]
    vocabulary = Vocabulary(pa.array(entities, pa.large_string()), "entity")
    labels = SimpleNamespace(entities=vocabulary, relations=model.relation_labels)
    model = replace(model, labels=labels, store=None)
    with TestClient(create_app(model, "evil")) as client:
        reply = client.get("/entities", params={"count": 1})
        assert reply.json()["labels"] == [evil]
        unknown = client.get("/nearest", params={"entity": f"{evil}x"})
        assert unknown.json()["suggestions"] == [evil]
        assert unknown.json()["detail"].isprintable()
        key = client.post("/nearest", json={evil: 1})
        assert key.status_code == 422 and key.json()["detail"].isprintable()
        for each in (reply, unknown, key):
            assert each.text.isprintable()


def test_calibrated_probabilities_are_served(model):
    calibration = Calibration("platt", {"tail": Curve(2.0)}, 1, "", {})
    with TestClient(
        create_app(replace(model, read_calibration=lambda: calibration), "tiny")
    ) as client:
        results = client.get("/predict", params={"head": "e1", "relation": "r1"}).json()["answers"]
        assert all(0 < one["probability"] < 1 for one in results)
