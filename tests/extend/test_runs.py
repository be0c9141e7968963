"""Runs of parts from another package: trained, resumed, ranked, exported and planned like ours."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import oracle_scorers
import pytest
import torch
from extended import ALL, ENGINES, LION, MIXED, REFE, rank_trains
from models import test_scorers
from planned_runs import plan_of
from training_runs import config_of, fit, largest_difference, tiny_store
from worlds import run_world

from kge_torchrec import (
    api,
    load_model,
)
from kge_torchrec.cli import run_verb
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import ExportError


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


@pytest.fixture(scope="module")
def worlds(folder, store, tmp_path_factory) -> dict[int, list[tuple[dict, dict]]]:
    """Results by number of ranks: both engines with sampled negatives, then all-answers queries.

    The last but one trains on fewer entities than four ranks, so that one rank has no scores. Four
    ranks run only this case.
    """
    results, few = {}, tmp_path_factory.mktemp("few")
    few = tiny_store(few / "store", entities=3, train=12, held_out=1).path
    for world in (1, 2, 4):
        runs = tmp_path_factory.mktemp("runs")
        configs = [config_of(store, runs / e, entities__engine=e, **ALL) for e in ENGINES]
        full = {**ALL, "negatives__regime": "kvsall", "negatives__chunk_size": 0}
        configs.append(config_of(store, runs / "kvsall", **full))
        few_changes = {**full, "loss__name": "foreign_parts:CrossEntropy", "loss__options": {}}
        configs.append(config_of(few, runs / "few", **few_changes))
        answers = {**full, "negatives__regime": "kvssample"}
        configs.append(config_of(store, runs / "kvssample", **answers))
        configs = configs[3:4] if world == 4 else configs
        results[world] = run_world(world, rank_trains, folder, configs)[0]
    return results


def test_every_world_size_and_engine_trains_to_the_same_parameters(worlds):
    (first, _), (_, _), (full, _), (few, _), (answers, _) = worlds[1]
    ((on_four, _),) = worlds[4]
    assert largest_difference(on_four, few) < 1e-5
    for of_world in (worlds[1], worlds[2]):
        for actual, expected in zip(of_world, (first, first, full, few, answers), strict=True):
            assert largest_difference(actual[0], expected) < 1e-5
    for one, other in itertools.combinations((first, full, answers), 2):
        assert largest_difference(one, other) > 1e-2
    assert first["relations"].shape == (6, 4 + 8)


def test_ranks_follow_the_definition(worlds, store):
    """Compute ranks from the parameters, in numpy and float64."""
    graph = TripleStore.open(store)
    known = {
        tuple(row) for name in ("train", "valid", "test") for row in graph.split(name).tolist()
    }
    for results, ranked in (worlds[1][0], worlds[2][0]):
        table, relations = (results[k].double().numpy() for k in ("entities", "relations"))
        numbers = table[:, 0::2] + 1j * table[:, 1::2]
        ranks = []
        for head, relation, tail in graph.test.tolist():
            for anchor, row, answer, triple in (
                (head, relation, tail, lambda e, h=head, r=relation: (h, r, e)),
                (tail, relation + 3, head, lambda e, t=tail, r=relation: (e, r, t)),
            ):
                phase, move = relations[row, :4], relations[row, 4:]
                point = numbers[anchor].conj() * np.exp(1j * phase) + move[0::2] + 1j * move[1::2]
                scores = -(abs(point - numbers) ** 2).sum(1)
                others = [e for e in range(len(table)) if triple(e) not in known]
                ranks.append(1 + sum(scores[e] > scores[answer] for e in others))
        ranks = np.array(ranks)
        assert ranked["mrr"] == pytest.approx((1 / ranks).mean(), abs=1e-6)
        assert ranked["mr"] == pytest.approx(ranks.mean(), abs=1e-6)
        assert ranked["hits@10"] == pytest.approx((ranks <= 10).mean(), abs=1e-6)


def test_run_resumes_with_more_ranks(folder, store, worlds, tmp_path):
    start = config_of(store, tmp_path / "run", **{**ALL, "train__epochs": 1})
    fit(start)
    end = config_of(store, tmp_path / "run", **ALL)
    ((result, _),) = run_world(2, rank_trains, folder, [end])[0]
    assert largest_difference(result, worlds[1][0][0]) < 1e-5


def test_run_resumes_with_the_states_of_another_optimizer(folder, store, tmp_path):
    changes = {**ALL, "train__optimizer": LION, "train__lr": 0.01,
               "entities__engine": "handrolled"}  # fmt: skip
    uninterrupted = fit(config_of(store, tmp_path / "whole", **changes)).parameters
    fit(config_of(store, tmp_path / "run", **{**changes, "train__epochs": 1}))
    assert largest_difference(
        fit(config_of(store, tmp_path / "run", **changes)).parameters, uninterrupted
    ) == 0  # fmt: skip


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


def test_export_without_its_module_reports_the_import_error(export, folder):
    sys.path.remove(str(folder))
    kept = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("my_parts")
    }
    try:
        with pytest.raises(ExportError, match=f"names the class {REFE}.*--allow-import") as raised:
            load_model(export[0])
        assert "damaged" not in str(raised.value)
    finally:
        sys.path.insert(0, str(folder))
        sys.modules.update(kept)


def test_plan_uses_the_costs_that_classes_declare(folder, capsys):
    keys = {"model__scorer": REFE, "model__dim": 8, "model__reciprocal": False}
    plan = plan_of("2xCPU", **keys, train__optimizer=LION, negatives__sampling=MIXED)
    assert plan.costs.dense_numbers == 7 * (4 + 8)
    bare = plan_of("2xCPU", **keys, model__options={"moves": False})
    assert bare.costs.dense_numbers == 7 * 4
    sizes = ["--entities=1M", "--relations=10", "--triples=1M", "--devices=2xCPU-64GB",
             "--model.dim=128"]  # fmt: skip
    assert run_verb("plan", [*sizes, "--model.scorer", REFE, "--train.optimizer", LION]) == 0
    said = capsys.readouterr().out
    assert f"({LION}), {REFE} with 10 relations" in said
    sizes = dict(re.findall(r"^  (\w[\w ]+?)  +(\S+ \w+)$", said, re.MULTILINE))
    assert sizes["optimizer state"] == sizes["weights"] == "0.24 GiB"  # one state
