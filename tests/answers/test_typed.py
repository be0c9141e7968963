"""Answers of a graph whose entities have types: only of types that the relation has there."""

from __future__ import annotations

import random

import pytest
from training_runs import config_of

from kge_torchrec import api, load_model, trained_model
from kge_torchrec.answers.calibration import listed as listed_answers
from kge_torchrec.errors import DataError
from kge_torchrec.ranking import candidates


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """A run over users and places, where users visit places and follow users."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("typed")
    lines = {f"user:{draw.randrange(20)}\tvisits\tplace:{draw.randrange(15)}" for _ in range(90)}
    lines |= {f"user:{draw.randrange(20)}\tfollows\tuser:{draw.randrange(20)}" for _ in range(90)}
    ordered = sorted(lines)
    draw.shuffle(ordered)
    (folder / "graph").mkdir()
    for split, part in (("valid", ordered[:20]), ("test", ordered[20:40]), ("train", ordered[40:])):
        (folder / "graph" / f"{split}.txt").write_text("".join(f"{line}\n" for line in part))
    config = config_of(folder / "graph", folder / "run", data__types="prefix")
    with api.train(config) as run:
        yield run


@pytest.mark.parametrize("kind", ["all", "seen"])
def test_new_links_are_of_the_types_of_the_relation(typed, kind):
    for relation, tail in (("visits", "place:"), ("follows", "user:")):
        links = typed.new_links(relation, 2000, kind)
        assert len(links) > 50
        assert all(link.head.startswith("user:") for link in links)
        assert all(link.tail.startswith(tail) for link in links)
        scores = [link.score for link in links]
        assert scores == typed.score([(x.head, x.relation, x.tail) for x in links])
        assert scores == sorted(scores, reverse=True)
        first = links[0]
        if kind == "all":
            best = typed.predict(first.head, relation, k=100, known=False)
            others = [a.label for a in best if a.label != first.head]
            assert others == [x.tail for x in links if x.head == first.head]


def test_calibration_is_fitted_to_answers_that_predict_lists(typed):
    """Every query of valid lists the same answers as ``predict`` without known ones."""
    model = typed.model
    store = model.store
    heads = {tuple(row[:2]) for row in store.valid.tolist()}
    own = listed_answers(model, "valid", "tail", 100, 1000, 0)
    valid = {tuple(row) for row in store.valid.tolist()}
    listed = []
    for head, relation in sorted(heads):
        answers = typed.predict(store.entities[head], store.relations[relation], k=100)
        listed += [a.score for a in answers if a.known in (None, "valid")]
    assert sorted(own.scores.tolist()) == sorted(listed)
    assert own.labels.sum() == len(valid)


def test_sets_of_candidates_are_made_once(typed, monkeypatch):
    made = []
    for name in ("Frequencies", "TypedCandidates"):
        make = getattr(candidates, name)
        monkeypatch.setattr(
            trained_model, name, lambda *x, n=name, make=make: made.append(n) or make(*x)
        )
    model = typed.model
    model._kept.clear()
    for _ in range(3):
        model.candidates("types")
        typed.predict("user:1", "visits")
        typed.recommend("user:1", "visits")
    assert made == ["Frequencies", "TypedCandidates"]


def test_an_export_keeps_to_the_types(typed, tmp_path):
    exported = load_model(typed.export(tmp_path / "export"))
    for user in ("user:1", "user:7"):
        for ask in (typed, exported):
            answers = ask.predict(user, "visits", k=100)
            assert {a.label.partition(":")[0] for a in answers} == {"place"}
            follows = ask.recommend(user, "follows", candidates="all", k=100)
            assert {a.label.partition(":")[0] for a in follows} == {"user"}
        ours, theirs = (ask.predict(user, "visits", k=100) for ask in (typed, exported))
        assert [(a.label, a.score) for a in ours] == [(a.label, a.score) for a in theirs]
        items = {a.label for a in exported.recommend(user, "visits", k=100)}
        assert items and all(item.startswith("place:") for item in items)
    with pytest.raises(DataError, match="the head 'place:1' is a place; 'visits' has a user"):
        exported.predict("place:1", "visits")
