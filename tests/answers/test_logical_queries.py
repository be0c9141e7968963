"""The example of logical queries against a dense evaluation that has every entity in its beam."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kge_torchrec.answers.calibration import Calibration, Curve
from kge_torchrec.errors import UnknownLabelError

N = 37
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "logical_queries.py"
STEP = {"relation": "r0", "from": "e1"}
TWO_STEPS = {"relation": "r1", "to": STEP}
QUERIES = {
    "entity": "e3",
    "one step": STEP,
    "two steps": TWO_STEPS,
    "three steps": {"relation": "r2", "from": TWO_STEPS},
    "and": {"and": [STEP, {"relation": "r2", "to": "e4"}]},
    "not": {"and": [STEP, {"not": {"relation": "r2", "to": "e4"}}]},
    "or": {"or": [STEP, TWO_STEPS, "e7"]},
    "step of and": {"relation": "r0", "from": {"and": [STEP, {"relation": "r1", "to": "e2"}]}},
    "not of steps": {"and": [{"or": ["e1", STEP]}, {"not": TWO_STEPS}]},
}


def tables(model, certain):
    """{(relation, side): (N, N) float64 of anchor and answer}, all probabilities."""
    results, pairs = {}, torch.cartesian_prod(torch.arange(N), torch.arange(N))
    facts = model.store.train.tolist() if certain else []
    for relation in range(model.num_relations):
        for side, ends in (("tail", (0, 2)), ("head", (2, 0))):
            anchors, answers = pairs.T if side == "tail" else pairs.flip(1).T
            triples = torch.stack([anchors, torch.full_like(anchors, relation), answers], 1)
            scores = model.scores(triples, side).view(N, N).double()
            known = [(t[ends[0]], t[ends[1]]) for t in facts if t[1] == relation]
            if model.calibration is not None:
                numbers, curves = np.full((N, N), relation), model.calibration
                chances = torch.tensor(curves.probabilities(scores.numpy(), side, numbers))
            else:
                counts = torch.tensor([max(1, sum(x == e for x, _ in known)) for e in range(N)])
                chances = (scores.softmax(1) * counts[:, None]).clamp_max(1)
            for anchor, answer in known:
                chances[anchor, answer] = 1
            results[relation, side] = chances
    return results


def degrees_of(model, query, chances):
    """(N,) degrees of a query: the best of all paths to each entity."""
    if isinstance(query, str):
        return (torch.arange(N) == model.entity_ids(query)).double()
    if "relation" in query:
        side, key = ("tail", "from") if "from" in query else ("head", "to")
        table = chances[int(model.relation_ids(query["relation"])), side]
        return (degrees_of(model, query[key], chances)[:, None] * table).max(0).values
    result = None
    for part in query.get("and") or query["or"]:
        negated = isinstance(part, dict) and "not" in part
        degrees = degrees_of(model, part["not"] if negated else part, chances)
        degrees = 1 - degrees if negated else degrees
        if result is None:
            result = degrees
        else:
            both = result * degrees
            result = both if "and" in query else result + degrees - both
    return result


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("certain", [False, True])
def test_degrees_match_dense_evaluation(example, model, calibrated, certain):
    if calibrated:
        made = Calibration({"tail": Curve(slope=3.0, intercept=-1.0)}, {}, 0, "", {})
        model = replace(model, calibration=made)
    queries, chances = example["LogicalQueries"](model, N, certain), tables(model, certain)
    for name, query in QUERIES.items():
        expected = degrees_of(model, query, chances)
        assert queries.degrees(query).tolist() == pytest.approx(expected.tolist(), abs=1e-5), name
        results = dict(queries.answer(query, N))
        assert list(results.values()) == sorted(results.values(), reverse=True), name
        best = expected.topk(min(3, int((expected > 0).sum())))
        assert list(results.values())[:3] == pytest.approx(best.values.tolist(), abs=1e-5), name


def test_beam_keeps_the_best_entities(example, model):
    queries = example["LogicalQueries"](model, beam=2, certain=False)
    first = queries.answer(STEP, 2)
    expected = torch.zeros(N).double()
    for label, degree in first:
        step = {"relation": "r1", "to": label}
        expected = expected.maximum(degree * queries.degrees(step))
    assert queries.degrees(TWO_STEPS).tolist() == pytest.approx(expected.tolist())


def test_invalid_queries_are_rejected(example, model):
    queries = example["LogicalQueries"](model)
    for query in (
        5,
        {},
        {"and": []},
        {"relation": "r0"},
        {**STEP, "to": "e2"},
        {**STEP, "depth": 2},
    ):
        with pytest.raises(ValueError, match="expected a label, or an object with the keys"):
            queries.degrees(query)
    with pytest.raises(UnknownLabelError):
        queries.degrees("nobody")


def test_program_prints_the_best_answers(example, model, tmp_path, monkeypatch, capsys):
    (tmp_path / "q.json").write_text(json.dumps(TWO_STEPS))
    arguments = [str(model.path), str(tmp_path / "q.json")]
    monkeypatch.setattr("sys.argv", ["logical_queries.py", *arguments, "--top", "3"])
    example["main"]()
    expected = example["LogicalQueries"](model).answer(TWO_STEPS, 3)
    assert capsys.readouterr().out == "".join(f"{x:.4f}  {label}\n" for label, x in expected)
