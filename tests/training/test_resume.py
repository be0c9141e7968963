"""Runs killed by SIGKILL and resumed end where the uninterrupted run ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from disk_runs import DISK
from grown_runs import tensors
from training_runs import (
    config_of,
    dies_after,
    fit,
    largest_difference,
    longer_config,
)
from worlds import WorldError, run_world

from kge_torchrec import api
from kge_torchrec.config import OPTIMIZER_NAMES
from kge_torchrec.training import checkpoints as module
from kge_torchrec.training.checkpoint_files import Checkpoint
from kge_torchrec.training.run_folder import RunFolder

TIMES = {"seconds", "triples_per_second"}
EMA = {"train__averaging": "ema", "train__averaging_options": {"decay": 0.3}}
EMA_OF_STEPS = {"train__averaging": "ema", "checkpoint__every__steps": 2,
                "train__averaging_options": {"decay": 0.9, "every_steps": 3}}  # fmt: skip
FSDP = {"dense__wrapper": "fsdp", "entities__engine": "handrolled"}
BACKGROUND = {"checkpoint__every__steps": 2, "checkpoint__options__background": True}


def options(optimizer: str) -> dict:
    """Each optimizer with another schedule and another interval of checkpoints."""
    number = OPTIMIZER_NAMES.index(optimizer)
    schedule = ("cosine", "plateau", "constant", "linear", "exponential")[number]
    schedule_options = {"plateau": {"decay": 0.5, "patience": 0}, "exponential": {"decay": 0.5}}
    return {
        "train__optimizer": optimizer,
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


# keys, and the number of ranks before and after the kill
KILLED = [
    (options("rowwise_adam"), 1, 1),
    (options("rowwise_adagrad"), 2, 2),
    (options("adagrad"), 1, 2),
    (options("adam"), 4, 1),
    (EMA_OF_STEPS, 2, 1),
    ({**EMA, **FSDP}, 2, 2),
    (DISK, 2, 2),
    (BACKGROUND, 2, 2),
    ({"checkpoint__every__epochs": 0}, 1, 1),  # there is no checkpoint
]


def rank_trains(store: Path, folder: Path, changes: dict, dies: int | None = None) -> None:
    """Train or resume a run; perhaps die by SIGKILL after a step."""
    module.SMALL = 0 if changes is BACKGROUND or changes == BACKGROUND else module.SMALL
    fit(longer_config(store, folder, **changes), dies_after(dies))


def metrics(run: Path) -> list[dict]:
    """metrics.jsonl without times."""
    lines = RunFolder(run).load_metrics()
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def progress(run: Path) -> dict:
    """That of the newest checkpoint, without times."""
    opened = Checkpoint.open(sorted((run / "checkpoints").glob("step-*"))[-1])
    return {k: v for k, v in opened.progress.to_dict().items() if k not in TIMES}


@pytest.mark.parametrize(("changes", "before", "after"), KILLED, ids=lambda x: str(x)[:60])
def test_killed_run_ends_where_an_uninterrupted_one_does(store, tmp_path, changes, before, after):
    """On as many ranks to the bit, with optimizer state, averages and log."""
    whole, run, same = tmp_path / "whole", tmp_path / "run", before == after
    run_world(after if same else 1, rank_trains, store, whole, changes)
    with pytest.raises(WorldError, match="died with exit code -9"):
        run_world(before, rank_trains, store, run, changes, 13)
    run_world(after, rank_trains, store, run, changes)
    expected, results = tensors(whole), tensors(run)
    assert expected.keys() == results.keys()
    if same:
        assert all(torch.equal(expected[name], results[name]) for name in expected)
        assert progress(run) == progress(whole)
        assert changes == BACKGROUND or metrics(run) == metrics(whole)
    for name in expected:
        if name.startswith(("model.", "raw.")):
            assert largest_difference({"": expected[name]}, {"": results[name]}) <= 1e-5, name


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
