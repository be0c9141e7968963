"""Probabilities: what is fitted, what it is worth, where it is kept, when it is not used."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec import api, load_model
from kge_torchrec.answers import calibration
from kge_torchrec.answers.bulk import score_file
from kge_torchrec.answers.calibration import (
    FILE,
    OWN_FROM,
    Calibration,
    Curve,
    Listed,
    errors,
    fit,
    fit_by_relation,
    listed,
    sigmoid,
)
from kge_torchrec.config import ConfigError
from kge_torchrec.data.store import SPLITS
from kge_torchrec.errors import DataError, KGEError

METHODS = ("platt", "isotonic")


def sample(count=20_000, seed=0):
    """Scores whose probability is known: sigmoid(2 s - 1)."""
    random = np.random.default_rng(seed)
    scores = random.normal(0, 2, count).astype(np.float32)
    true = 1 / (1 + np.exp(1 - 2 * scores))
    return scores, random.random(count) < true, true


@pytest.mark.parametrize("method", METHODS)
def test_known_curve_is_recovered(method, monkeypatch):
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    monkeypatch.setattr(calibration, "STEPS_FROM", 10 if method == "isotonic" else 10**6)
    scores, labels, true = sample()
    curve = fit(scores, labels)
    assert bool(curve.scores) == (method == "isotonic")
    fresh, labels, true = sample(seed=1)
    results = curve.at(fresh)
    assert np.abs(results - true).mean() < 0.015
    assert np.all(np.diff(curve.at(np.sort(fresh))) >= 0)
    raw = 1 / (1 + np.exp(-fresh.astype(np.float64)))
    before, after = errors(raw, labels), errors(results, labels)
    assert after["expected_calibration_error"] < 0.02 < 0.08 < before["expected_calibration_error"]
    assert after["brier_score"] < before["brier_score"]
    special = curve.at(np.array([np.inf, -np.inf, np.nan, 1e30]))
    assert special[0] > 0.99 and special[3] > 0.99 and special[1] == special[2] < 0.01
    if method == "platt":
        assert (curve.slope, curve.intercept) == pytest.approx((2, -1), abs=0.1)


def test_calibration_errors_match_hand_computation():
    probabilities, labels = np.array([0.9, 0.92, 0.1, 1.0]), np.array([True, False, False, True])
    # Bins of 1/15: 0.9 and 0.92 lie in one, 0.1 and 1.0 in others.
    expected = (abs(0.9 - 1 + 0.92) + 0.1 + 0) / 4
    squares = (0.01 + 0.92**2 + 0.01 + 0) / 4
    logs = -(np.log(0.9) + np.log(0.08) + np.log(0.9) + 0) / 4
    assert errors(probabilities, labels) == pytest.approx(
        {"mean_probability": 0.73, "expected_calibration_error": expected, "brier_score": squares,
         "log_loss": logs}
    )  # fmt: skip


@pytest.fixture
def own(run, tmp_path):
    """A copy of the run that may be calibrated."""
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    with api.open_run(shutil.copytree(run.path, tmp_path / "run")) as copied:
        yield copied


@pytest.mark.parametrize("method", METHODS)
def test_calibrated_run_has_probabilities(own, method, monkeypatch):
    monkeypatch.setattr(calibration, "STEPS_FROM", 10 if method == "isotonic" else 10_000)
    before = own.predict("e1", "r0")
    assert {a.probability for a in before} == {None}
    made = own.calibrate()
    assert bool(made.curves["tail"].scores) == (method == "isotonic")
    assert set(made.curves) == {"head", "relation", "tail"}  # of reciprocal relations
    errors = {kind: made.about["test"][kind]["expected_calibration_error"]
              for kind in ("sigmoid", "calibrated")}  # fmt: skip
    assert 0 <= errors["calibrated"] < errors["sigmoid"] < 1
    for side, query in (("tail", ("e1", "r0", None)), ("head", (None, "r0", "e1")),
                        ("relation", ("e1", None, "e2"))):  # fmt: skip
        results = own.predict(*query)
        expected = made.curves[side].at(np.array([a.score for a in results], np.float32))
        assert [a.probability for a in results] == expected.tolist()
    assert [(a.label, a.score) for a in own.predict("e1", "r0")] == [
        (a.label, a.score) for a in before
    ]
    with api.open_run(own.path) as again:
        assert again.predict("e1", "r0") == own.predict("e1", "r0")


def test_listed_answers_match_predict(own):
    """Each distinct query of test lists its best answers, without those of train and valid."""
    model, store = own.model, own.model.store
    known = {name: {tuple(t) for t in store.split(name).tolist()} for name in SPLITS}
    for missing, place in (("head", 0), ("relation", 1), ("tail", 2)):
        expected = []
        for query in sorted({(*t[:place], None, *t[place + 1 :]) for t in known["test"]}, key=str):
            ids = [x if x is None else int(x) for x in query]
            answers = own.predict(*ids, k=50)
            vocabulary = model.relation_labels if missing == "relation" else model.entity_labels
            numbers = vocabulary.ids([a.label for a in answers]).tolist()
            whole = [tuple(n if x is None else x for x in ids) for n in numbers]
            left = [(a.score, t in known["test"]) for a, t in zip(answers, whole, strict=True)
                    if t not in known["train"] | known["valid"]]  # fmt: skip
            expected += left[:4]
        results = listed(model, "test", missing, 4, 1000, 0)
        pairs = zip(results.scores.tolist(), results.labels.tolist(), strict=True)
        assert sorted(pairs) == sorted(expected) and len(np.unique(results.queries)) > 5
        assert len(np.unique(listed(model, "test", missing, 4, 3, 0).queries)) == 3


def test_probabilities_match_the_share_of_true_answers(own, monkeypatch):
    """On the answers themselves to which the curves were fitted."""
    monkeypatch.setattr(calibration, "STEPS_FROM", 10)
    made = own.calibrate(top=5)
    for missing, curve in made.curves.items():
        answers = listed(own.model, "valid", missing, 5, 1000, 0)
        results, count = curve.at(answers.scores), len(answers.labels)
        # A step of no true answers has the probability 1 / 2M.
        assert results.mean() == pytest.approx(answers.labels.mean(), abs=0.5 / count + 1e-5)
    test = made.about["test"]
    own_share = test["calibrated"]["mean_probability"]
    assert abs(own_share - test["true"] / test["answers"]) < 0.1


def test_calibration_of_another_step_is_ignored(own, tmp_path, caplog):
    own.calibrate()
    file = own.path / FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 1}))
    with api.open_run(own.path) as again:
        assert again.predict("e1", "r0")[0].probability is None
        model = load_model(again.export(tmp_path / "export"))
    assert "was calibrated after 1 steps" in caplog.text
    assert model.predict("e1", "r0")[0].probability is None
    file.write_text("{")
    with api.open_run(own.path) as again, pytest.raises(DataError, match="is damaged"):
        again.predict("e1", "r0")


def test_bad_arguments_and_missing_data_are_rejected(run, monkeypatch):
    for options in ({"top": 0}, {"limit": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} must be"):
            run.calibrate(**options)
    with pytest.raises(KGEError, match="needs true and false triples"):
        fit(np.zeros(3), np.ones(3, bool))
    monkeypatch.setitem(__import__("sys").modules, "sklearn.isotonic", None)
    with pytest.raises(KGEError, match=r"needs scikit-learn: pip install -e '.\[calib"):
        run.calibrate()
    assert not (run.path / FILE).exists()


def answers_of(chances, seed=0):
    """Three answers to each of many queries; a relation's chance is a function of the score."""
    random, found = np.random.default_rng(seed), []
    for relation, (chance, count) in enumerate(chances):
        scores = random.normal(0, 2, 3 * count).astype(np.float32)
        labels = random.random(3 * count) < chance(scores)
        queries = np.repeat(np.arange(count), 3)
        found.append(Listed(queries, scores, labels, np.full(3 * count, relation)))
    return Listed.merged(found)


def test_relations_have_their_own_curve_where_it_predicts_better():
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    rising, falling = (lambda s: sigmoid(2.0 * s)), (lambda s: sigmoid(2.0 * s - 5))
    answers = answers_of([(rising, 900), (rising, 900), (falling, 400), (falling, OWN_FROM - 1)])
    common, own = fit_by_relation(answers, 0)
    assert set(own) == {2} or set(own) == {0, 1, 2}  # the fourth has too few queries
    made = Calibration({"tail": common}, {"tail": own}, 1, "", {})
    fresh = answers_of([(rising, 900), (rising, 900), (falling, 400)], seed=1)
    chosen = fresh.relations == 2
    found = made.probabilities(fresh.scores, "tail", fresh.relations)
    assert errors(found[chosen], fresh.labels[chosen])["expected_calibration_error"] < 0.04
    one = common.at(fresh.scores)
    assert errors(one[chosen], fresh.labels[chosen])["expected_calibration_error"] > 0.1
    assert errors(found, fresh.labels)["log_loss"] < errors(one, fresh.labels)["log_loss"]
    # A query without relation lists answers of several, so one curve keeps their order.
    assert (made.probabilities(fresh.scores, "relation", fresh.relations) == one).all()


def test_equal_relations_share_the_common_curve():
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    chance = lambda s: sigmoid(2.0 * s - 1)  # noqa: E731
    for seed in range(3):
        common, own = fit_by_relation(answers_of([(chance, 60)] * 20, seed), seed)
        assert len(own) <= 4  # by chance
        rows = np.linspace(-3, 3, 50)
        assert np.abs(common.at(rows) - chance(rows)).mean() < 0.05


def test_a_relation_with_one_kind_of_answer_has_the_common_curve():
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    never, half = (lambda s: 0 * s), (lambda s: sigmoid(s))
    _, own = fit_by_relation(answers_of([(never, 100), (half, 100)]), 0)
    assert 0 not in own


curves = st.one_of(
    st.builds(Curve, st.floats(0.01, 50), st.floats(-20, 20)),
    st.lists(st.tuples(st.integers(-40, 40), st.floats(0, 1)), min_size=2, max_size=8,
             unique_by=lambda pair: pair[0]).map(
        lambda pairs: Curve(scores=tuple(sorted(s for s, _ in pairs)),
                            probabilities=tuple(sorted(p for _, p in pairs)))),
)  # fmt: skip


@settings(max_examples=40)
@given(curves, st.lists(st.integers(-4000, 4000), min_size=2, max_size=20, unique=True))
def test_larger_scores_have_larger_probabilities(curve, quarters):
    special = curve.at(np.array([-np.inf, np.nan, np.inf]))
    found = curve.at(np.sort(quarters) / 4)
    assert special[0] == special[1] <= found.min() and special[2] >= found.max()
    assert found.min() >= 0 and found.max() <= 1
    rising = np.diff(found)
    assert (rising >= 0).all()
    if curve.scores:  # a sigmoid reaches 1 in float64
        assert (rising > 0).all()


@settings(max_examples=25)
@given(
    st.integers(0, 2**32 - 1), st.integers(2, 3000), st.floats(0.01, 0.99), st.sampled_from([1, -1])
)
def test_fitted_curves_keep_the_order_and_the_share_of_true_answers(seed, count, share, sign):
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    random = np.random.default_rng(seed)
    labels = random.random(count) < share
    labels[:2] = True, False
    scores = (random.normal(size=count) + sign * labels).astype(np.float32)
    found = fit(scores, labels).at(scores)
    assert (np.diff(found[np.argsort(scores)]) >= 0).all()
    assert abs(found.mean() - labels.mean()) < 0.01
    if count > 100:  # a sigmoid of few scores, which labels separate, reaches 1 in float64
        assert found.min() > 0 and found.max() < 1
    assert errors(found, labels)["log_loss"] < 1


@settings(max_examples=20)
@given(st.dictionaries(st.integers(0, 50), curves, max_size=3), curves,
       st.lists(st.tuples(st.floats(-5, 5, width=16), st.integers(0, 50)), max_size=9))  # fmt: skip
def test_a_calibration_that_was_written_answers_as_before(own, common, answers):
    made = Calibration({"tail": common, "head": common}, {"tail": own}, 3, "data", {"top": 2})
    scores = np.array([score for score, _ in answers], np.float32)
    relations = np.array([relation for _, relation in answers], np.int64)
    with tempfile.TemporaryDirectory() as folder:
        made.write(Path(folder))
        again = Calibration.read(Path(folder))
    assert again.is_of(3, "data") and not again.is_of(4, "data")
    for missing in ("head", "relation", "tail"):
        found = made.probabilities(scores, missing, relations)
        np.testing.assert_array_equal(found, again.probabilities(scores, missing, relations))
        by_one = [(own.get(r, common) if missing == "tail" else common).at(np.array([s]))[0]
                  for s, r in zip(scores, relations, strict=True)]  # fmt: skip
        np.testing.assert_array_equal(found, by_one)


def test_own_curves_are_used_by_every_answer_and_go_into_exports(own, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "OWN_FROM", 3)
    monkeypatch.setattr(calibration, "log_losses", lambda p, labels: p * 0 + next(losses))
    losses = iter(range(10**6, 0, -1))  # each curve of a relation seems to predict better
    made = own.calibrate()
    assert {*made.own} == {"head", "tail"} and made.own["tail"]
    monkeypatch.undo()
    relation = next(iter(made.own["tail"]))
    label = own.model.relation_labels.labels([relation])[0]
    curve, (best, *_) = made.own["tail"][relation], own.predict("e1", label)
    assert best.probability == curve.at(np.float32([best.score]))[0]
    (link,) = own.new_links(label, 1)
    assert link.probability == curve.at(np.float32([link.score]))[0]
    (tmp_path / "t").write_text(f"e1\t{label}\te2\n")
    score_file(own.model, tmp_path / "t", output=tmp_path / "out", format="json")
    row = json.loads((tmp_path / "out").read_text())
    assert row["probability"] == curve.at(np.float32([row["score"]]))[0]
    model = load_model(own.export(tmp_path / "export"))
    assert [x.probability for x in model.predict("e1", label)] == [
        x.probability for x in own.predict("e1", label)
    ]
    relations = {row["relation"]: row for row in made.about["relations"]}
    assert relations[label]["own_curve"] and relations[label]["answers"] > 0
    assert sum(row["answers"] for row in relations.values()) < made.about["test"]["answers"]
