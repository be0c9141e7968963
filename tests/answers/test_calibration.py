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
    METHODS,
    Calibration,
    Curve,
    brier_score,
    candidate_answers,
    expected_calibration_error,
    fit,
)
from kge_torchrec.answers.classification import Pools, corrupt, labelled
from kge_torchrec.config import ConfigError
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import SPLITS
from kge_torchrec.errors import DataError, KGEError


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
    curve = fit(method, scores, labels, np.ones(len(scores)))
    fresh, labels, true = sample(seed=1)
    results = curve.at(fresh)
    assert np.abs(results - true).mean() < 0.015
    assert np.all(np.diff(curve.at(np.sort(fresh))) >= 0)
    ones = np.ones(len(fresh))
    raw = 1 / (1 + np.exp(-fresh.astype(np.float64)))
    assert expected_calibration_error(results, labels, ones) < 0.02
    assert expected_calibration_error(raw, labels, ones) > 0.08
    assert brier_score(results, labels, ones) < brier_score(raw, labels, ones)
    special = curve.at(np.array([np.inf, -np.inf, np.nan, 1e30]))
    assert special[0] > 0.99 and special[3] > 0.99 and special[1] == special[2] < 0.01
    if method == "platt":
        assert (curve.slope, curve.intercept) == pytest.approx((2, -1), abs=0.1)


def test_weights_act_like_repetitions():
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    scores, labels, _ = sample(2000)
    weights = np.where(labels, 3.0, 1.0)
    times = weights.astype(int)
    repeated = np.repeat(scores, times), np.repeat(labels, times), np.ones(times.sum())
    for method in METHODS:
        curve, other = fit(method, scores, labels, weights), fit(method, *repeated)
        grid = np.linspace(-4, 4, 50)
        np.testing.assert_allclose(curve.at(grid), other.at(grid), atol=2e-3)


def test_calibration_errors_match_hand_computation():
    probabilities, labels = np.array([0.9, 0.92, 0.1, 1.0]), np.array([True, False, False, True])
    weights = np.array([1.0, 1.0, 2.0, 1.0])
    # Bins of 1/15: 0.9 and 0.92 lie in one, 0.1 and 1.0 in others.
    expected = (abs(0.9 - 1 + 0.92) + 2 * 0.1 + 0) / 5
    assert expected_calibration_error(probabilities, labels, weights) == pytest.approx(expected)
    squares = (0.01 + 0.92**2 + 2 * 0.01 + 0) / 5
    assert brier_score(probabilities, labels, weights) == pytest.approx(squares)


@pytest.fixture
def own(run, tmp_path):
    """A copy of the run that may be calibrated."""
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    with api.open_run(shutil.copytree(run.path, tmp_path / "run")) as copied:
        yield copied


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.first_tier("platt")
def test_calibrated_run_has_probabilities(own, tmp_path, method):
    before = own.predict("e1", "r0")
    assert {a.probability for a in before} == {None}
    made = own.calibrate(method=method)
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


def test_candidate_answers_match_predict(own):
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
        results = candidate_answers(model, "test", missing, 4, 1000, 0)
        pairs = zip(results.scores.tolist(), results.labels.tolist(), strict=True)
        assert sorted(pairs) == sorted(expected) and results.queries > 5
        assert candidate_answers(model, "test", missing, 4, 3, 0).queries == 3


def test_probabilities_match_the_share_of_true_answers(own):
    """On the answers themselves to which the curves were fitted."""
    made = own.calibrate(method="isotonic", top=5)
    for missing, curve in made.curves.items():
        answers = candidate_answers(own.model, "valid", missing, 5, 1000, 0)
        results = curve.at(answers.scores)
        assert results.mean() == pytest.approx(answers.labels.mean(), abs=1e-3)
    own_share = made.about["test"]["mean_probability"]["after"]
    assert abs(own_share - made.about["test"]["true"]) < 0.1
    other = own.calibrate(among="seen", positive_share=0.5, method="isotonic").about
    errors = other["test"]["expected_calibration_error"]["after"]
    assert errors > 0.1 + made.about["test"]["expected_calibration_error"]["after"]
    assert other["test_corruptions"]["triples"] == 30
    assert other["test"]["queries"] == made.about["test"]["queries"]


def test_isotonic_is_the_default_for_many_scores(own, monkeypatch):
    assert own.calibrate().method == "platt"
    monkeypatch.setattr(calibration, "STEPS_FROM", 10)
    assert own.calibrate().method == own.calibrate().about["method"] == "isotonic"


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


def test_bad_options_and_missing_data_are_rejected(run, tmp_path, monkeypatch):
    for options, words in (({"method": "beta"}, "method must be one of platt, isotonic"),
                           ({"corruptions": 0, "among": "all"}, "corruptions must be"),
                           ({"among": "types"}, "among must be one of listed, seen, all"),
                           ({"positive_share": 1.0, "among": "all"}, "positive_share must lie"),
                           ({"positive_share": 0.1}, "positive_share has no effect with among l"),
                           ({"corruptions": 2}, "corruptions has no effect with among listed"),
                           ({"top": 2, "among": "seen"}, "top has no effect with among seen"),
                           ({"top": 0}, "top must be"), ({"limit": 0}, "limit must be"),
                           ({"seed": -1}, "seed must be")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            run.calibrate(**options)
    with pytest.raises(KGEError, match="needs true and false triples"):
        fit("platt", np.zeros(3), np.ones(3, bool), np.ones(3))
    monkeypatch.setitem(__import__("sys").modules, "sklearn.isotonic", None)
    with pytest.raises(KGEError, match=r"needs scikit-learn: pip install 'kge-torchrec\[calib"):
        run.calibrate()
    assert not (run.path / FILE).exists()


def test_equal_scores_have_equal_probabilities():
    one = Calibration("platt", {"both": Curve(slope=1.0)}, 1, "", {})
    for missing in ("head", "relation", "tail"):
        assert one.probabilities(np.zeros(1), missing).tolist() == [0.5]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Relation r links 40 a's to 3 b's, s occurs only in valid, and n links all to all."""
    triples = [(f"a{i}", "r", f"b{i % 3}") for i in range(40)]
    every = [(f"c{i}", "n", f"c{j}") for i in range(3) for j in range(3)]
    splits = {"train": [*triples[:36], *every], "valid": [*triples[36:], ("a1", "n", "c0")],
              "test": triples[:1]}  # fmt: skip
    return prepare(splits, tmp_path_factory.mktemp("store") / "store")


@pytest.mark.parametrize("among", ["seen", "all"])
def test_corruptions_are_false_and_change_one_side(store, among):
    triples = np.asarray(store.valid, np.int64)
    known = {tuple(t) for s in ("train", "valid", "test") for t in store.split(s).tolist()}
    for part in labelled(store, "valid", 6, among, 3, 1000):
        column = 0 if part.side == "head" else 2
        assert part.triples[: len(triples)].tolist() == triples.tolist()
        assert part.labels.tolist() == [True] * 5 + [False] * (len(part.labels) - 5)
        false = part.triples[~part.labels]
        assert len(false) > 6 and not known & {tuple(t) for t in false.tolist()}
        rest = np.delete(false, column, 1).tolist()
        assert all(one in np.delete(triples, column, 1).tolist() for one in rest)
        if among == "seen":
            labels = store.entities.labels(false[:, column])
            of_r = {x for x, t in zip(labels, false, strict=True) if t[1] == triples[0, 1]}
            assert all(x.startswith("a" if part.side == "head" else "b") for x in of_r)
        again = {x.side: x.triples for x in labelled(store, "valid", 6, among, 3, 1000)}
        assert np.array_equal(again[part.side], part.triples)


def test_uncorruptible_triples_are_left_out(store):
    """Everything that n links to c0 is true among the c's."""
    (n,), (c,) = store.relations.ids(["n"]), store.entities.ids(["c1"])
    random = np.random.default_rng(0)
    pools = Pools(store, np.array([n]), random)
    triple = np.array([[c, n, c]])
    assert corrupt(store, triple, "tail", 5, pools, random).shape == (0, 3)
    assert corrupt(store, triple, "tail", 5, None, random).shape == (5, 3)


def test_pools_sample_every_chunk(store, monkeypatch):
    from kge_torchrec.answers import classification

    monkeypatch.setattr("kge_torchrec.data.sort.CHUNK", 7)
    monkeypatch.setattr(classification, "POOL", 1000)
    random = np.random.default_rng(0)
    pools = Pools(store, np.arange(store.num_relations), random)
    train = np.asarray(store.train).tolist()
    assert sorted(pools._triples.tolist()) == sorted(train)
    monkeypatch.setattr(classification, "POOL", 5)
    small = Pools(store, np.arange(store.num_relations), random)._triples.tolist()
    assert len(small) == 10 and all(t in train for t in small)
    assert len({tuple(t) for t in small}) == 10


def test_large_split_is_sampled(store):
    for part in labelled(store, "train", 1, "all", 0, 7):
        assert part.labels.sum() == 7
