"""Logical queries against a dense evaluation that has every entity in its beam."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kge_torchrec.answers import logical_queries
from kge_torchrec.answers.calibration import Calibration, Curve
from kge_torchrec.answers.logical_queries import DEEPEST, AskOptions, QueryError, ask, parse_query
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import DataError, UnknownLabelError
from kge_torchrec.models.scorers import SIDES

N = 37
NEIGHBOURS = {"relation": "r0", "from": "e1"}
TWO_STEPS = {"relation": "r1", "to": NEIGHBOURS}
QUERIES = {
    "entity": {"or": ["e3"]},
    "one step": NEIGHBOURS,
    "two steps": TWO_STEPS,
    "three steps": {"relation": "r2", "from": TWO_STEPS},
    "and": {"and": [NEIGHBOURS, {"relation": "r2", "to": "e4"}]},
    "not": {"and": [NEIGHBOURS, {"not": {"relation": "r2", "to": "e4"}}]},
    "or": {"or": [NEIGHBOURS, TWO_STEPS, "e7"]},
    "step of or": {"relation": "r0", "from": {"or": ["e1", {"relation": "r1", "to": "e2"}]}},
    "not of steps": {"and": [{"or": ["e1", NEIGHBOURS]}, {"not": TWO_STEPS}]},
}


def tables(run, facts, calibration=None):
    """{(relation, side): (N, N) float64 of anchor and answer}, all probabilities."""
    model, store = run.model, run.model.store
    results = {}
    every = torch.cartesian_prod(torch.arange(N), torch.arange(N))
    for relation in range(store.num_relations):
        for side in SIDES:
            columns = every if side == "tail" else every.flip(1)
            triples = torch.stack([columns[:, 0], torch.full((N * N,), relation), columns[:, 1]], 1)
            scores = model.scores(triples, side).view(N, N).double()
            if calibration:
                chance = torch.from_numpy(calibration.probabilities(scores.numpy(), side))
            else:
                counts = torch.zeros(N)
                for h, r, t in store.train.tolist():
                    if r == relation:
                        counts[h if side == "tail" else t] += 1
                chance = (scores.softmax(1) * counts.clamp_min(1)[:, None]).clamp_max(1)
            for split in facts:
                for h, r, t in store.split(split).tolist():
                    if r == relation:
                        anchor, answer = (h, t) if side == "tail" else (t, h)
                        chance[anchor, answer] = 1
            results[relation, side] = chance
    return results


def dense(run, query, chances, both, either):
    """(N,) degrees of a query as it stands in JSON."""
    store = run.model.store

    def degrees(query):
        if isinstance(query, str):
            return torch.nn.functional.one_hot(
                torch.tensor(store.entities.ids([query])[0]), N
            ).double()
        if "relation" in query:
            side = "tail" if "from" in query else "head"
            of = degrees(query["from" if side == "tail" else "to"])
            table = chances[int(store.relations.ids([query["relation"]])[0]), side]
            return both(of[:, None], table).max(0).values
        if "or" in query:
            parts = [degrees(part) for part in query["or"]]
            joined = parts[0]
            for part in parts[1:]:
                joined = either(joined, part)
            return joined
        joined = torch.ones(N).double()
        for part in query["and"]:
            joined = both(joined, 1 - degrees(part["not"]) if "not" in part else degrees(part))
        return joined

    return degrees(query)


NORMS = {
    "product": (lambda x, y: x * y, lambda x, y: x + y - x * y),
    "min": (torch.minimum, torch.maximum),
}


@pytest.mark.parametrize(
    "t_norm, facts", [("product", "all"), ("min", "train"), ("product", "none")]
)
def test_degrees_match_dense_evaluation(run, t_norm, facts):
    splits = {"all": ("train", "valid", "test"), "train": ("train",), "none": ()}[facts]
    chances = tables(run, splits)
    label = run.model.store.entities.labels(range(N))
    for name, query in QUERIES.items():
        expected = dense(run, query, chances, *NORMS[t_norm])
        results = run.ask(query, k=N, beam=N, t_norm=t_norm, facts=facts)
        degrees = dict.fromkeys(label, 0.0) | {m.label: m.score for m in results}
        assert [degrees[x] for x in label] == pytest.approx(expected.tolist(), abs=1e-5), name
        scores = [m.score for m in results]
        assert scores == sorted(scores, reverse=True) and min(scores) > 0
        assert [m.rank for m in results] == list(range(1, len(results) + 1))


def test_degrees_of_a_calibrated_run_are_probabilities(run):
    calibration = Calibration("platt", {"both": Curve(slope=3.0, intercept=-1.0)}, 0, "", {})
    plain = run.model
    model = replace(plain, read_calibration=lambda: calibration)
    chances = tables(run, ("train",), calibration)
    expected = dense(run, TWO_STEPS, chances, *NORMS["product"])
    options = AskOptions(k=N, beam=N, facts="train")
    results = {m.label: m.score for m in ask(model, parse_query(TWO_STEPS, model), options)}
    label = run.model.store.entities.labels(range(N))
    assert [results[x] for x in label] == pytest.approx(expected.tolist(), abs=1e-5)


def test_equal_probabilities_sort_by_score(run):
    """Isotonic calibration gives many entities the same probability."""
    plain, curve = run.model, Curve(scores=(-0.1, 0.1), probabilities=(0.2, 0.2))
    calibration = Calibration("isotonic", {"both": curve}, 0, "", {})
    model = replace(plain, read_calibration=lambda: calibration)
    results = ask(model, parse_query(NEIGHBOURS, model), AskOptions(k=N, facts="none"))
    expected = run.predict("e1", "r0", k=N)
    assert [member.label for member in results] == [answer.label for answer in expected]


def test_certain_answers_sort_by_score(run):
    """Several expected numbers of answers are above 1, where probabilities end."""
    model = run.model
    for entity in range(N):
        for relation in range(3):
            query = {"relation": f"r{relation}", "from": f"e{entity}"}
            results = ask(model, parse_query(query, model), AskOptions(k=N, facts="none"))
            expected = run.predict(f"e{entity}", f"r{relation}", k=N)
            assert [member.label for member in results] == [answer.label for answer in expected]
    many = torch.tensor([0.5, 1.5, 2.5, 1e9], dtype=torch.float64)
    assert logical_queries._at_most_one(many).diff().min() > 0
    assert logical_queries._at_most_one(many).max() <= 1


def test_path_to_each_answer_is_returned(run):
    """Each step of the way, multiplied, is the degree."""
    query = {"relation": "r2", "from": {"relation": "r1", "to": NEIGHBOURS}}
    chances = tables(run, ("train", "valid", "test"))
    ids = run.model.store.entities.ids
    r0, r1, r2 = run.model.store.relations.ids(["r0", "r1", "r2"]).tolist()
    for member in run.ask(query, k=5):
        assert len(member.via) == 2
        answer, last, first, start = ids([member.label, *member.via, "e1"]).tolist()
        way = (chances[r0, "tail"][start, first] * chances[r1, "head"][first, last]
               * chances[r2, "tail"][last, answer])  # fmt: skip
        assert member.score == pytest.approx(float(way), abs=1e-5)
    assert run.ask(NEIGHBOURS)[0].via == ()


def test_beam_bounds_the_search(run):
    """With a beam of 1, a step starts from the best entity only."""
    best = run.ask(NEIGHBOURS, k=1)[0]
    one = {m.label: m.score for m in run.ask(TWO_STEPS, k=N, beam=1)}
    single = {m.label: m.score for m in run.ask({"relation": "r1", "to": best.label}, k=N)}
    assert one == pytest.approx({x: s * best.score for x, s in single.items()}, abs=1e-6)


def test_export_answers_with_softmax(run, model):
    results, expected = model.ask(NEIGHBOURS, k=3), run.model.scores
    ids = torch.tensor([[*model.entity_labels.ids(["e1"]), *model.relation_labels.ids(["r0"]), t]
                        for t in range(N)])  # fmt: skip
    chances = expected(ids).softmax(0).sort(descending=True).values[:3]
    assert [m.score for m in results] == pytest.approx(chances.tolist(), rel=1e-4)


def test_query_files_are_read(run, tmp_path):
    file = tmp_path / "query.json"
    file.write_text(json.dumps(TWO_STEPS))
    assert run.ask(file) == run.ask(str(file)) == run.ask(TWO_STEPS)
    file.write_text("{")
    with pytest.raises(DataError, match=r"query.json: invalid JSON"):
        run.ask(file)
    with pytest.raises(DataError, match="nothing: no such file"):
        run.ask(tmp_path / "nothing")


BAD = {
    "a number": (3, "query: expected the label of an entity or an object"),
    "other keys": ({"relation": "r0"}, "query: expected .* got"),
    "both ends": ({"relation": "r0", "from": "e1", "to": "e2"}, "query: expected"),
    "relation": ({"relation": 3, "from": "e1"}, "query.relation: expected a label, got 3"),
    "deep": ({"and": ["e1", {"relation": "r0", "to": 4}]}, r"query.and\[1\].to: expected"),
    "no list": ({"or": "e1"}, "query.or: expected a list"),
    "empty": ({"and": []}, "query.and: expected a list"),
    "lone not": ({"not": "e1"}, 'query: "not" must be inside an "and"'),
    "not alone": ({"and": [{"not": "e1"}]}, 'query.and: "and" needs at least one query'),
    "not in or": ({"or": ["e1", {"not": "e2"}]}, r'query.or\[1\]: "not" must be inside an "and"'),
}


@pytest.mark.parametrize("query, words", BAD.values(), ids=BAD)
def test_invalid_queries_are_rejected(model, query, words):
    with pytest.raises(QueryError, match=words):
        model.ask(query if not isinstance(query, str) else [query])


def test_unknown_labels_options_and_depth(model):
    with pytest.raises(UnknownLabelError, match=r"unknown entity 'e11x'; did you mean"):
        model.ask({"relation": "r0", "from": "e11x"})
    for options in ({"k": 0}, {"beam": 0}, {"t_norm": "max"}, {"facts": "test"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            model.ask(NEIGHBOURS, **options)
    query = "e1"
    for _ in range(DEEPEST + 1):
        query = {"relation": "r0", "from": query}
    with pytest.raises(QueryError, match="more than 50 nested steps"):
        model.ask(query)


def test_empty_query_has_no_members(run):
    nobody = {"and": ["e1", "e2"]}
    assert run.ask(nobody) == run.ask({"relation": "r0", "from": nobody}) == []
    assert np.isclose(run.ask({"and": ["e1", "e1"]})[0].score, 1)


def test_deeply_nested_json_is_rejected(model, tmp_path):
    deep, query = 100_000, {"and": [["e1"]]}
    (tmp_path / "q").write_text('{"and": [' * deep + '"e1"' + "]}" * deep)
    with pytest.raises(QueryError, match="q: more than 50 nested steps"):
        model.ask(tmp_path / "q")
    for _ in range(deep):
        query = [query]
    with pytest.raises(QueryError, match="got JSON that is nested too deeply"):
        model.ask(query)
    with pytest.raises(QueryError, match=r"got \{'e1'\}"):
        model.ask({"e1"})
