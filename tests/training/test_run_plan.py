"""The plan that a run stores, and runs laid out by a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_runs import config_of, fit, largest_difference, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tiny_store(tmp_path_factory.mktemp("graph") / "store").path


@pytest.fixture(scope="module")
def first(store, tmp_path_factory) -> Path:
    """A run, whose plan others take."""
    run = tmp_path_factory.mktemp("runs") / "first"
    api_trains(store, run)
    return run


def trains(store: Path, run: Path, changes: dict) -> dict:
    return fit(config_of(store, run, **changes)).parameters


def api_trains(store: Path, run: Path) -> None:
    api.train(config_of(store, run, train__epochs=1)).close()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.slow
def test_run_stores_its_plan_and_another_run_uses_it(store, tmp_path, world_size):
    run_world(world_size, api_trains, store, tmp_path / "first")
    plan = tmp_path / "first" / "plan.json"
    shards = json.loads(plan.read_text())["sharding"]["shards"]
    assert sum(shard["rows"] for shard in shards) == 37 and len(shards) == world_size
    assert "row_wise" in (tmp_path / "first" / "plan.txt").read_text()
    plain = run_world(world_size, trains, store, tmp_path / "plain", {})[0]
    planned = run_world(world_size, trains, store, tmp_path / "planned", {"run__plan": str(plan)})[
        0
    ]
    assert largest_difference(plain, planned) == 0


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model__dim": 16}, "model.dim is 8 there and 16 here"),
        ({"train__optimizer": "adam"}, "train.optimizer is 'adagrad' there and 'adam' here"),
        ({"entities__engine": "handrolled"}, "run.plan"),
    ],
)
def test_plan_of_another_run_is_rejected(store, first, tmp_path, changes, words):
    plan = str(first / "plan.json")
    with pytest.raises(ConfigError, match=words):
        api.train(config_of(store, tmp_path / "second", run__plan=plan, **changes))
    assert not (tmp_path / "second").exists()


def test_plan_and_train_work_on_the_command_line(store, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    keys = [f"--data.path={store}", "--model.dim=8", "--device=cpu"]
    assert main(["plan", "--devices", "1xCPU", "--output", str(plan), *keys]) == 0
    assert "It fits" in capsys.readouterr().out
    train = ["train", *keys, "--train.epochs=1", "--run.progress=false", "--evaluation.every=0"]
    assert main([*train, "--plan", str(plan), f"--run.dir={tmp_path / 'run'}"]) == 0
    assert main([*train, f"--plan={plan}", f"--run.dir={tmp_path / 'wide'}", "--model.dim=16"]) == 1
    assert "is a plan for another run" in capsys.readouterr().err


def uses(run: Path, out: Path) -> dict:
    """Everything that a trained run is for."""
    with api.open_run(run) as opened:
        opened.predict(head="e1", relation="r0")
        opened.export(out)
        return opened.evaluate()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.slow
def test_planned_run_can_be_evaluated_queried_and_exported(store, first, tmp_path, world_size):
    plan = str(first / "plan.json")
    run = api.train(config_of(store, tmp_path / "planned", train__epochs=1, run__plan=plan))
    results = run_world(world_size, uses, run.path, tmp_path / "export")[0]
    mrr = run.results["test"]["both"]["realistic"]["mrr"]
    assert results["both"]["realistic"]["mrr"] == pytest.approx(mrr, abs=1e-5)


def rank_resumes(run: Path, overrides: dict) -> dict:
    with api.resume(run, overrides) as opened:
        return opened.results["test"]["both"]["realistic"]


@pytest.mark.parametrize("gone", [pytest.param(False, marks=pytest.mark.slow), True])
def test_planned_run_resumes_on_other_ranks_and_without_its_plan(store, tmp_path, gone):
    uninterrupted = api.train(config_of(store, tmp_path / "whole", train__epochs=2))
    api_trains(store, tmp_path / "first")
    plan = tmp_path / "first" / "plan.json"
    api.train(config_of(store, tmp_path / "run", train__epochs=1, run__plan=str(plan))).close()
    if gone:
        plan.unlink()
    results = run_world(2, rank_resumes, tmp_path / "run", {"train.epochs": 2})[0]
    assert results == pytest.approx(uninterrupted.results["test"]["both"]["realistic"], abs=1e-4)


@pytest.mark.slow
def test_plan_of_a_resumed_run_must_fit(store, tmp_path):
    run_world(2, api_trains, store, tmp_path / "of_two")
    api_trains(store, tmp_path / "run")
    plan = {"run.plan": str(tmp_path / "of_two" / "plan.json"), "train.epochs": 2}
    with pytest.raises(ConfigError, match="the number of ranks is 2 there and 1 here"):
        api.resume(tmp_path / "run", plan)
