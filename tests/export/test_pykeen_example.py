"""docs/examples/to_pykeen.py: PyKEEN's formulas, with the tables of the script, give our scores.

PyKEEN computes them itself where it is installed, in a process of its own: it does not load where
TorchRec is loaded. ``python tests/export/test_pykeen_example.py`` is that process.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_models import N, R, model_of, our_scores, same, triples
from torch import Tensor

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "to_pykeen.py"))
MODELS = [(scorer, reciprocal) for scorer in EXAMPLE["FORMULAS"] for reciprocal in (False, True)]


def formula(made, h: list[Tensor], r: list[Tensor], t: list[Tensor]) -> Tensor:
    """PyKEEN 1.11's score of rows (n, ...) of each table, written from its source."""
    p, powers = made.options.get("p"), made.options.get("power_norm")

    def distance(difference: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(difference, ord=p, dim=-1)
        return -(lengths**p if powers else lengths)

    if made.name == "TransE":
        return distance(h[0] + r[0] - t[0])
    if made.name == "TransH":  # projections on the hyperplane of a unit vector
        normal, shift = r
        onto = lambda x: x - (x * normal).sum(-1, keepdim=True) * normal  # noqa: E731
        return distance(onto(h[0]) + shift - onto(t[0]))
    if made.name == "MuRE":  # biases as a head, and as a tail
        return distance(h[0] * r[1] + r[0] - t[0]) + h[1] + t[2]
    if made.name == "PairRE":
        return distance(h[0] * r[0] - t[0] * r[1])
    if made.name == "RotatE":
        return -torch.linalg.vector_norm(h[0] * r[0] - t[0], dim=-1)
    if made.name == "CP":  # every entity has a table as a head, and another as a tail
        return torch.einsum("nkd,nkd,nkd->n", h[0], r[0], t[1])
    if made.name == "TuckER":
        core = made.parameters["core_tensor"].double()
        return torch.einsum("hrt,nh,nr,nt->n", core, h[0], r[0], t[0])
    if made.name == "RESCAL":
        return torch.einsum("nd,nde,ne->n", h[0], r[0], t[0])
    assert made.name in ("DistMult", "ComplEx")
    return (h[0] * r[0] * t[0].conj()).sum(-1).real


def check(model) -> None:
    """Compares the formula with our scores of 1,000 triples, on both sides."""
    made = EXAMPLE["interaction_of"](model)
    double = lambda x: x.to(torch.complex128 if x.is_complex() else torch.float64)  # noqa: E731
    entities, relations = ([double(x) for x in of] for of in (made.entities, made.relations))
    head, relation, tail = triples()
    for side in ("tail", "head"):
        one, number, other = head, relation, tail
        if side == "head" and model.scorer.reciprocal:
            one, number, other = tail, relation + R, head
        rows = ([table[ids] for table in entities] for ids in (one, other))
        anchors, targets = rows
        scores = formula(made, anchors, [table[number] for table in relations], targets)
        same(scores, model, side)


@pytest.mark.parametrize("scorer, reciprocal", MODELS)
def test_formulas_of_the_example_give_our_scores(scorer, reciprocal):
    check(model_of(scorer, reciprocal))


@pytest.mark.parametrize("normalization", ["unit", "layer"])
def test_normalized_rows_give_our_scores(normalization):
    check(model_of("distmult", False, normalization))


@pytest.mark.parametrize("scorer, biases", [("conve", False), ("complex", True)])
def test_models_that_pykeen_lacks_are_rejected(scorer, biases):
    with pytest.raises(SystemExit, match=r"only the formulas of transe_l1, .*without biases"):
        EXAMPLE["interaction_of"](model_of(scorer, True, biases=biases))


def test_pykeen_scores_match(export, tmp_path):
    if not importlib.util.find_spec("pykeen"):
        pytest.skip("pykeen is not installed")
    places = map(str, (Path(__file__).parents[1], Path(__file__).parents[2], *sys.path))
    done = subprocess.run(
        [sys.executable, __file__, export, tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"trained_model.pkl", "training_triples"} <= files


def in_pykeen() -> None:
    head, relation, tail = triples()
    for scorer, reciprocal in MODELS:
        model = model_of(scorer, reciprocal)
        network, factory = EXAMPLE["to_pykeen"](model)
        assert (factory.num_entities, factory.real_num_relations) == (N, R)
        with torch.no_grad():
            network.double()
            tails = network.predict_hrt(torch.stack([head, relation, tail], 1))[:, 0]
            heads = network.predict_h(torch.stack([relation, tail], 1))
        for side, scores in (("tail", tails), ("head", heads.gather(1, head[:, None])[:, 0])):
            largest = ((scores - our_scores(model, side)).abs() / (1 + scores.abs())).max().item()
            print(f"{scorer} {side} {'reciprocal' if reciprocal else ''}: {largest:.1e}")
            assert largest < 1e-6
    runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "to_pykeen.py"),
                   run_name="__main__")  # fmt: skip


if __name__ == "__main__":
    in_pykeen()
