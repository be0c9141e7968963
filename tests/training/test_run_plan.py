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


def trains(store: Path, run: Path, changes: dict) -> dict:
    return fit(config_of(store, run, **changes)).parameters


def api_trains(store: Path, run: Path) -> None:
    api.train(config_of(store, run, train__epochs=1)).close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_stores_its_plan_and_another_trains_by_it(store, tmp_path, world_size):
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
def test_a_plan_of_another_run_is_refused(store, tmp_path, changes, words):
    api.train(config_of(store, tmp_path / "first", train__epochs=1)).close()
    plan = str(tmp_path / "first" / "plan.json")
    with pytest.raises(ConfigError, match=words):
        api.train(config_of(store, tmp_path / "second", run__plan=plan, **changes))
    assert not (tmp_path / "second").exists()


def test_plan_and_train_on_the_command_line(store, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    keys = [f"--data.path={store}", "--model.dim=8", "--device=cpu"]
    assert main(["plan", "--devices", "1xCPU", "--output", str(plan), *keys]) == 0
    assert "It fits" in capsys.readouterr().out
    train = ["train", *keys, "--train.epochs=1", "--run.progress=false", "--evaluation.every=0"]
    assert main([*train, "--plan", str(plan), f"--run.dir={tmp_path / 'run'}"]) == 0
    assert main([*train, f"--plan={plan}", f"--run.dir={tmp_path / 'wide'}", "--model.dim=16"]) == 1
    assert "is a plan for another run" in capsys.readouterr().err
