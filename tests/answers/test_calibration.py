"""Probabilities: what is fitted, what it is worth, where it is kept, when it is not used."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from kge_torchrec import api, load_model
from kge_torchrec.answers import calibration
from kge_torchrec.answers.calibration import (
    FILE,
    Calibration,
    Curve,
    errors,
    fit,
    listed,
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
def test_known_curve_is_recovered(method):
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    scores, labels, true = sample()
    curve = fit(method, scores, labels)
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
    assert errors(probabilities, labels) == pytest.approx(
        {"mean_probability": 0.73, "expected_calibration_error": expected, "brier_score": squares}
    )


@pytest.fixture
def own(run, tmp_path):
    """A copy of the run that may be calibrated."""
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    with api.open_run(shutil.copytree(run.path, tmp_path / "run")) as copied:
        yield copied


@pytest.mark.parametrize("method", METHODS)
def test_calibrated_run_has_probabilities(own, tmp_path, method, monkeypatch):
    monkeypatch.setattr(calibration, "STEPS_FROM", 10 if method == "isotonic" else 10_000)
    before = own.predict("e1", "r0")
    assert {a.probability for a in before} == {None}
    made = own.calibrate()
    assert made.method == made.about["method"] == method
    assert set(made.curves) == {"head", "relation", "tail"}  # of reciprocal relations
    errors = made.about["test"]["expected_calibration_error"]
    assert 0 <= errors["after"] < errors["before"] < 1
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
        (tmp_path / "t").write_text("e1\tr0\te2\n")
        again.score_file(tmp_path / "t", tmp_path / "out", "json")
        row = json.loads((tmp_path / "out").read_text())
        assert row["probability"] == made.probabilities(np.float32([row["score"]]), "tail")[0]
        assert again.new_links("r0", 1)[0].probability is not None
        model = load_model(again.export(tmp_path / "export"))
    assert [(a.label, a.probability) for a in model.predict("e1", "r0")] == [
        (a.label, a.probability) for a in own.predict("e1", "r0")
    ]


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
        assert sorted(pairs) == sorted(expected) and results.queries > 5
        assert listed(model, "test", missing, 4, 3, 0).queries == 3


def test_probabilities_match_the_share_of_true_answers(own, monkeypatch):
    """On the answers themselves to which the curves were fitted."""
    monkeypatch.setattr(calibration, "STEPS_FROM", 10)
    made = own.calibrate(top=5)
    for missing, curve in made.curves.items():
        answers = listed(own.model, "valid", missing, 5, 1000, 0)
        results = curve.at(answers.scores)
        assert results.mean() == pytest.approx(answers.labels.mean(), abs=1e-3)
    own_share = made.about["test"]["mean_probability"]["after"]
    assert abs(own_share - made.about["test"]["true"]) < 0.1


def test_isotonic_steps_keep_the_order_of_scores():
    curve = Curve(scores=(0.0, 1.0, 1.5, 3.0), probabilities=(0.0, 0.0, 1.0, 1.0))
    scores = np.array([-1e30, -50, -3, 0, 0.5, 1, 1.2, 1.5, 2, 3, 4])
    results = curve.at(scores).astype(np.float32)
    assert np.all(np.diff(results) > 0) and results[0] >= 0 and results[-1] <= 1
    assert np.abs(results - np.interp(scores, curve.scores, curve.probabilities)).max() <= 1e-4
    special = curve.at(np.array([-np.inf, np.nan, np.inf]))
    assert special[0] == special[1] == 0 and special[2] == 1


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
    for options in ({"top": 0}, {"limit": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} must be"):
            run.calibrate(**options)
    with pytest.raises(KGEError, match="needs true and false triples"):
        fit("platt", np.zeros(3), np.ones(3, bool))
    monkeypatch.setitem(__import__("sys").modules, "sklearn.isotonic", None)
    with pytest.raises(KGEError, match=r"needs scikit-learn: pip install -e '.\[calib"):
        run.calibrate()
    assert not (run.path / FILE).exists()


def test_equal_scores_have_equal_probabilities():
    one = Calibration("platt", {"both": Curve(slope=1.0)}, 1, "", {})
    for missing in ("head", "relation", "tail"):
        assert one.probabilities(np.zeros(1), missing).tolist() == [0.5]
