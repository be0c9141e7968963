"""Runs of parts from another package: trained, resumed, ranked, exported and planned like ours."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import oracle_scorers
import pytest
import torch
from extended import ALL, ENGINES, LION, MIXED, REFE, rank_trains
from models import test_scorers
from planned_runs import plan_of
from training_runs import config_of, largest_difference, tiny_store
from worlds import run_world

from kge_torchrec import (
    api,
    load_model,
)
from kge_torchrec.data.store import TripleStore


def refe(scorer, parameters, h, r, t):
    """One complex number after another."""
    half, total = len(h) // 2, 0.0
    moves = r[half:] if scorer.options.moves else np.zeros(len(h))
    for k in range(half):
        turned = complex(h[2 * k], -h[2 * k + 1]) * complex(math.cos(r[k]), math.sin(r[k]))
        there = turned + complex(moves[2 * k], moves[2 * k + 1])
        total += abs(there - complex(t[2 * k], t[2 * k + 1])) ** 2
    return -total


def test_scorer_has_the_properties_of_built_in_ones(folder, monkeypatch):
    monkeypatch.setitem(oracle_scorers.FORMULAS, "refe", refe)
    for options in ({}, {"moves": False}):
        test_scorers.test_scorer_has_the_properties_of_all((REFE, 6, options))
    test_scorers.test_small_distances_between_long_rows_keep_their_digits(REFE)


FULL = {"negatives__chunk_size": 0, "negatives__regime": "kvsall"}
TRAININGS = {
    **{engine: {"entities__engine": engine} for engine in ENGINES},
    "candidates of each triple": {"negatives__chunk_size": 1},
    "kvsall": FULL,
    "kvssample": {**FULL, "negatives__regime": "kvssample"},
    # fewer entities than four ranks, so that one has no scores
    "few": {**FULL, "loss__name": "foreign_parts:CrossEntropy", "loss__options": {}},
}


@pytest.fixture(scope="module")
def worlds(folder, store, tmp_path_factory) -> dict[int, dict[str, tuple[dict, dict]]]:
    """Results of each training by number of ranks; four ranks only train on few entities."""
    results, few = {}, tmp_path_factory.mktemp("few")
    few = tiny_store(few / "store", entities=3, train=12, held_out=1).path
    for world in (1, 2, 4):
        runs, names = tmp_path_factory.mktemp("runs"), ["few"] if world == 4 else [*TRAININGS]
        configs = [
            config_of(few if name == "few" else store, runs / name, **{**ALL, **TRAININGS[name]})
            for name in names
        ]
        first = run_world(world, rank_trains, folder, configs)[0]
        results[world] = dict(zip(names, first, strict=True))
    return results


def test_every_world_size_and_engine_trains_to_the_same_parameters(worlds):
    expected = {name: parameters for name, (parameters, _) in worlds[1].items()}
    expected["handrolled"] = expected["torchrec"]
    for of_world in worlds.values():
        for name, (parameters, _) in of_world.items():
            assert largest_difference(parameters, expected[name]) < 1e-5, name
    for one, other in itertools.combinations([*TRAININGS][1:-1], 2):
        assert largest_difference(expected[one], expected[other]) > 1e-2
    assert expected["torchrec"]["relations"].shape == (6, 4 + 8)


@pytest.fixture(scope="module")
def export(folder, store, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """An export, and the scores of all training triples by its run."""
    here = tmp_path_factory.mktemp("export")
    with api.train(config_of(store, here / "run", **{**ALL, "train__epochs": 1})) as run:
        train = torch.from_numpy(run.model.store.train.astype(np.int64))
        return run.export(here / "out"), run.model.scores(train)


def test_export_scores_equal_those_of_its_run(export, store):
    path, scores = export
    model, train = load_model(path), TripleStore.open(store).train.astype(np.int64)
    assert torch.equal(model.scores(torch.from_numpy(train)), scores)
    description = json.loads((path / "config.json").read_text())
    assert description["parameters"]["score"].startswith("RefE (Chami et al. 2020): score(h, r, t)")
    assert description["entities"]["row"].startswith("4 complex numbers")
    assert "D/2 phases, then a translation of D elements" in description["entities"]["layout"]


def test_plan_uses_the_costs_that_classes_declare(folder):
    keys = {"model__scorer": REFE, "model__dim": 8, "model__reciprocal": False}
    plan = plan_of("2xCPU", **keys, train__optimizer=LION, negatives__sampling=MIXED)
    assert plan.costs.dense_numbers == 7 * (4 + 8)
    bare = plan_of("2xCPU", **keys, model__options={"moves": False})
    assert bare.costs.dense_numbers == 7 * 4
