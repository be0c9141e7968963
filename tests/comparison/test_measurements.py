"""Training side by side: the recorded losses and differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training_runs import config_of, fit, parameters
from worlds import run_world as run_test_world

from kge_torchrec import comparison
from kge_torchrec.comparison import RankFailed, measured_steps, run_world, train_side_by_side
from kge_torchrec.config import Config
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session


def test_steps_at_which_parameters_are_compared():
    assert measured_steps(0) == [0]
    assert measured_steps(1) == [0, 1]
    assert measured_steps(60) == [0, 1, 2, 5, 10, 20, 50, 60]
    assert measured_steps(100) == [0, 1, 2, 5, 10, 20, 50, 100]


def trained(world_size: int, folder: Path, **configs: Config) -> list[dict]:
    return run_world(world_size, "cpu", train_side_by_side, configs, folder / "partial.json")


def test_equal_contenders_agree_and_different_ones_do_not(store, tmp_path):
    config = config_of(store, tmp_path, train__optimizer="adam", train__schedule="linear")
    faster = config_of(store, tmp_path, train__optimizer="adam", train__lr=0.1)
    results, *others = trained(2, tmp_path, one=config, two=config, faster=faster)
    assert all(other == results for other in others)  # every rank finds the same
    assert results["complete"] and results["steps"] == 2 * 5
    assert {len(losses) for losses in results["losses"].values()} == {10}
    assert results["losses"]["one"] == results["losses"]["two"] != results["losses"]["faster"]
    assert results["losses"]["one"][0] == results["losses"]["faster"][0]

    steps = [0, 1, 2, 5, 10]
    same, other = results["differences"]["two"], results["differences"]["faster"]
    assert [one["step"] for one in same] == [one["step"] for one in other] == steps
    assert all(one["entities"] == one["dense"] == 0 for one in same)
    assert other[0]["entities"] == other[0]["dense"] == 0
    # Adam's first step is the learning rate, whatever the gradient
    assert other[1]["entities"] == pytest.approx(0.05, rel=1e-2)
    assert other[-1]["entities"] > other[1]["entities"]
    assert set(results["metrics"]) == {"one", "two", "faster"} and results["split"] == "test"
    assert results["metrics"]["one"] == results["metrics"]["two"]


def test_losses_and_metrics_equal_those_of_a_normal_run(store, tmp_path):
    """``kge-torchrec train`` reports the same losses and metrics."""
    events = []
    config = config_of(store, tmp_path / "run", train__log_every=1)
    session = fit(config, lambda loop: loop.callbacks.append(lambda *event: events.append(event)))
    results = trained(1, tmp_path, one=config, two=config)[0]
    losses = [values["loss"] for kind, values in events if kind == "step"]
    assert results["losses"]["one"] == losses
    assert results["metrics"]["one"] == session.rank("test")


def test_zero_epochs_compare_initial_values(store, tmp_path):
    config = config_of(store, tmp_path, train__epochs=0)
    other = config_of(store, tmp_path, train__epochs=0, model__init_scale=0.25)
    results = trained(1, tmp_path, one=config, two=config, other=other)[0]
    assert results["complete"] and results["steps"] == 0 and results["metrics"] == {}
    assert results["differences"]["two"] == [{"step": 0, "entities": 0, "dense": 0}]
    assert results["differences"]["other"][0]["entities"] > 0.1


def test_nonfinite_loss_names_the_contender(store, tmp_path):
    keys = {"train__log_every": 5, "train__optimizer": "sgd", "loss__n3": 1.0}
    config, wild = (config_of(store, tmp_path, train__lr=lr, **keys) for lr in (1e-3, 1e30))
    with pytest.raises(RankFailed, match=r"NonFiniteLoss: wild: the loss is .* epoch"):
        trained(1, tmp_path, calm=config, wild=wild)
    assert not (tmp_path / "partial.json").exists()  # nothing was read before


CHANGES = {"row": 0.75, "nan": float("nan"), "dense": -0.25}


def rank_compares(store: Path, folder: Path) -> dict[str, tuple[dict, dict]]:
    """By change, made on the last rank: the differences, and the same from whole tables."""
    comparison.CHUNK_NUMBERS = 5 * 8  # several chunks of 5 rows, the last one smaller
    results = {}
    with processes("cpu") as ranks:
        one, other = (Session(config_of(store), RunFolder(folder), ranks) for _ in range(2))
        for change, by in CHANGES.items():
            rows, dense = other.backend.shard().rows, next(iter(other.scorer.parameters())).data
            changed = dense[0] if change == "dense" else rows[-1]
            before = changed.clone()
            if change == "dense" or ranks.rank == ranks.world_size - 1:
                changed[3] += by
            mine, theirs = parameters(one), parameters(other)
            apart = {name: float((mine[name] - theirs[name]).abs().max()) for name in mine}
            expected = {"entities": apart.pop("entities"), "dense": max(apart.values())}
            results[change] = (comparison.largest_differences(one, other), expected)
            changed.copy_(before)
    return results


def test_differences_against_whole_tables(store, tmp_path):
    for results in run_test_world(2, rank_compares, store, tmp_path):
        for measured, expected in results.values():
            np.testing.assert_equal(measured, expected)
        assert results["row"][0] == {"entities": pytest.approx(0.75), "dense": 0}
        assert results["dense"][0] == {"entities": 0, "dense": pytest.approx(0.25)}
        assert np.isnan(results["nan"][0]["entities"]) and results["nan"][0]["dense"] == 0
