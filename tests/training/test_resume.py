"""Runs killed by SIGKILL and resumed end where the uninterrupted run ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from training_runs import config_of, fit, largest_difference, longer_config, rank_trains
from worlds import WorldError, run_world

from kge_torchrec import api
from kge_torchrec.config import OPTIMIZER_NAMES, ConfigError
from kge_torchrec.training.state import TrainState
from kge_torchrec.training.trainer import Trainer

TIMES = {"seconds", "triples_per_second", "pause_ms"}


def options(optimizer: str) -> dict:
    """Each optimizer with another schedule and another interval of checkpoints."""
    number = OPTIMIZER_NAMES.index(optimizer)
    schedule = ("cosine", "plateau", "constant", "linear", "exponential")[number]
    schedule_options = {"plateau": {"decay": 0.5, "patience": 0}, "exponential": {"decay": 0.5}}
    return {
        "train__optimizer": optimizer,
        "train__epochs": 4,
        "train__lr": 0.02,
        "train__optimizer_options__weight_decay": None if optimizer in ("adagrad", "sgd") else 0.02,
        "train__schedule": schedule,
        "train__schedule_options": schedule_options.get(schedule, {}),
        "train__log_every": 2,
        "train__warmup_steps": (0, 0, 7, 0, 0)[number],
        "evaluation__every": (0, 1, 0, 2, 0)[number],
        "checkpoint__every__steps": (3, 0, 2, 0, 1)[number],
        "negatives__chunk_size": (0, 8, 1, 0, 8)[number],
    }


def metrics(run: Path) -> list[dict]:
    """metrics.jsonl without times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def killed(world_size: int, store: Path, run: Path, changes: dict) -> None:
    with pytest.raises(WorldError, match="died with exit code -9"):
        run_world(world_size, rank_trains, store, run, changes, 13)


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [("rowwise_adam", 1, 1), ("rowwise_adagrad", 2, 2), ("adagrad", 1, 2), ("sgd", 2, 4),
     ("adam", 4, 1)],
)  # fmt: skip
def test_killed_run_ends_where_an_uninterrupted_one_does(store, tmp_path, optimizer, before, after):
    """To the bit on as many ranks, with the same log."""
    changes, same = options(optimizer), before == after
    (whole, *_) = run_world(after if same else 1, rank_trains, store, tmp_path / "whole", changes)
    killed(before, store, tmp_path / "run", changes)
    (again, *_) = run_world(after, rank_trains, store, tmp_path / "run", changes)
    assert largest_difference(whole, again) <= (0 if same else 1e-5)
    assert not same or metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_killed_process_resumes(tmp_path):
    """`kge-torchrec train` on the embedded graph, then `train --resume`."""
    keys = {"train__epochs": 30, "train__batch_size": 256, "model__dim": 16,
            "train__optimizer": "adam", "evaluation__every": 10,
            "checkpoint__every__steps": 4}  # fmt: skip
    expected = api.train(longer_config("countries", tmp_path / "whole", **keys))
    config = longer_config("countries", tmp_path / "run", **keys)
    config.save(tmp_path / "config.yaml")
    command = [sys.executable, "-m", "kge_torchrec", "train"]
    process = subprocess.Popen([*command, str(tmp_path / "config.yaml")], cwd=root())
    wait_for_checkpoint(tmp_path / "run", process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run = api.resume(tmp_path / "run")
    assert run.results["test"] == expected.results["test"]
    assert metrics(run.path)[:-1] == metrics(expected.path)[:-1]  # but for the peak memory


def wait_for_checkpoint(run: Path, process: subprocess.Popen) -> None:
    """Wait until there is a checkpoint; fail if training ends first."""
    deadline = time.monotonic() + 60
    while not any(run.glob("checkpoints/step-*/manifest.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert process.poll() is None


def root() -> Path:
    return Path(__file__).resolve().parents[2]


def test_run_without_checkpoint_restarts(store, tmp_path):
    changes = {"checkpoint__every__epochs": 0, "train__epochs": 4}
    uninterrupted = run_world(1, rank_trains, store, tmp_path / "whole", changes)
    killed(1, store, tmp_path / "killed", changes)
    again = run_world(1, rank_trains, store, tmp_path / "killed", changes)
    assert largest_difference(uninterrupted[0], again[0]) == 0
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def test_finished_run_can_be_ranked_and_trained_longer(store, tmp_path):
    run = api.train(config_of(store, tmp_path / "short", train__epochs=2))
    lines = metrics(run.path)
    assert metrics(api.resume(run.path).path)[:-1] == lines[:-1]
    longer = api.resume(run.path, {"train.epochs": 4})
    assert longer.config.train.epochs == 4
    steps = [line["step"] for line in metrics(run.path) if line["kind"] == "epoch"]
    assert steps == [5, 10, 15, 20]
    uninterrupted = api.train(longer_config(store, tmp_path / "long"))
    assert longer.results["test"] == uninterrupted.results["test"]


def test_keys_of_a_checkpoint_cannot_change(store, tmp_path):
    run = api.train(
        config_of(store, tmp_path / "run", train__epochs=1, train__optimizer_options__eps=1e-8)
    )
    for key, value in {
        "model.dim": 16, "model.scorer": "distmult", "train.optimizer": "adam", "seed": 3,
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=rf"{key} is .* in this run and cannot change on"):
            api.resume(run.path, {key: value})
    assert api.resume(run.path).config == run.config


def test_no_temporary_files_are_left(store, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    api.train(config_of(store, tmp_path / "run", train__epochs=1)).close()
    assert not list((tmp_path / "tmp").iterdir())


def scripted(values: dict[str, list[float]]):
    """Validations that give these values of the metrics, one after another."""
    turns = {metric: iter(numbers) for metric, numbers in values.items()}

    def script(loop: Trainer) -> None:
        loop.session.validate = lambda: {
            "both": {"realistic": {metric: next(turn) for metric, turn in turns.items()}}
        }

    return script


def test_new_metric_resets_the_best_checkpoint(store, tmp_path, capsys):
    """A mean rank is never below an MRR: compared with each other nothing would be better."""
    options = {"evaluation__every": 1, "checkpoint__keep": 1}
    fit(config_of(store, tmp_path, train__epochs=2, **options), scripted({"mrr": [0.2, 0.4]}))
    ranks = {"mr": [18.5, 20.0, 12.0, 15.0]}
    options |= {"evaluation__metric": "mr", "run__progress": True}
    session = fit(config_of(store, tmp_path, train__epochs=6, **options), scripted(ranks))
    assert "selected by mrr so far and are by mr" in capsys.readouterr().err
    progress = session.checkpoints.open(session.checkpoints.names()[-1]).progress
    assert (progress.best_metric, progress.best_checkpoint) == (12.0, "step-000000000025")


@pytest.mark.parametrize("metric, better, worse", [("mr", 4.9, 5.1), ("mrr", 5.1, 4.9)])
def test_lower_mean_rank_is_better(metric, better, worse):
    progress = TrainState(best_metric=5.0)
    assert progress.is_better(metric, better) and not progress.is_better(metric, worse)
    assert not progress.is_better(metric, 5.0)


def test_sampled_validation_is_not_compared_with_full_validation(store, tmp_path):
    options = {"evaluation__every": 1, "checkpoint__keep": 1}
    sample = config_of(store, tmp_path, train__epochs=2, evaluation__max_triples=4, **options)
    fit(sample, scripted({"mrr": [0.9, 0.8]}))
    whole = longer_config(store, tmp_path, **options)
    session = fit(whole, scripted({"mrr": [0.3, 0.2]}))
    assert session.checkpoints.best() == "step-000000000015"


def test_sides_cannot_change_for_epochs_over_queries(store, tmp_path):
    keys = {"negatives__regime": "kvsall", "model__reciprocal": False, "train__epochs": 1}
    run = api.train(longer_config(store, tmp_path / "run", **keys))
    with pytest.raises(ConfigError, match=r"negatives.sides is 'both' in this run and cannot"):
        api.resume(run.path, {"negatives.sides": "tail", "train.epochs": 2})
