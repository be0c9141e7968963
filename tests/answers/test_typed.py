"""Answers of a graph whose entities have types: only of types that the relation has there."""

from __future__ import annotations

import pytest

from kge_torchrec import trained_model
from kge_torchrec.answers.calibration import listed as listed_answers
from kge_torchrec.errors import DataError
from kge_torchrec.ranking import candidates


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


def test_answers_are_of_the_types_of_the_relation(typed):
    for user in ("user:1", "user:7"):
        listed = [typed.predict(user, "visits", k=100), typed.recommend(user, "visits", k=100)]
        for answers, kind in (
            *((x, "place") for x in listed),
            (typed.recommend(user, "follows", candidates="all", k=100), "user"),
        ):
            assert {a.label.partition(":")[0] for a in answers} == {kind}
    with pytest.raises(DataError, match="the head 'place:1' is a place; 'visits' has a user"):
        typed.predict("place:1", "visits")
