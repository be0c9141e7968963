"""The losses that a run reports: the same on any number of ranks, and the dense oracle's."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import oracle_full_candidates
import oracle_training
import pytest
from training_runs import config_of, fit, parameters, shared_folder, tiny_store, without_checkpoints
from worlds import run_world

from kge_torchrec.config import Config, RunConfig
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session

# Of regularizers and of telling relations a rank knows its own share only.
CASES = {
    "sampled": {"loss__n3": 0.02},
    "sampled in parts": {"train__accumulation": 2, "loss__name": "bce", "loss__n3": 0.02},
    "kvssample": {"negatives__regime": "kvssample", "loss__n3": 0.02},
    "1vsall": {"negatives__regime": "1vsall", "loss__n3": 0.02, "loss__relation_weight": 0.5},
    "kvsall": {"negatives__regime": "kvsall", "loss__n3": 0.02},
    "allvsall": {
        "negatives__regime": "allvsall",
        "loss__name": "bce",
        "loss__regularizers__l2": 0.02,
    },
}


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store", entities=13, train=70, held_out=2).path


@functools.cache
def config(name: str) -> Config:
    sizes = {"train__batch_size": 24, "train__epochs": 1, "train__log_every": 1}
    return config_of(the_store(), **sizes, **CASES[name])


def rank_trains_all(configs: list[Config]) -> None:
    for config in configs:
        fit(config, without_checkpoints)


@functools.cache
def logged(world_size: int) -> dict[str, tuple[list[float], float]]:
    """Return by case the losses of every step and of the epoch."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: RunConfig(f"{folder}/{name}", progress=False) for name in CASES}
        configs = [replace(config(name), run=run) for name, run in runs.items()]
        run_world(world_size, rank_trains_all, configs)
        for name, run in runs.items():
            lines = (Path(run.dir) / "metrics.jsonl").read_text().splitlines()
            values = [(line["kind"], line["loss"]) for line in map(json.loads, lines)]
            (epoch,) = [loss for kind, loss in values if kind == "epoch"]
            results[name] = [loss for kind, loss in values if kind == "step"], epoch
    return results


@functools.cache
def expected(name: str) -> list[float]:
    """The dense oracle's loss of every step."""
    with processes("cpu") as ranks:
        start = parameters(Session(config(name), RunFolder("nowhere"), ranks))
    oracle = oracle_training if name.startswith("sampled") else oracle_full_candidates
    losses: list[float] = []
    oracle.train_dense(config(name), TripleStore.open(the_store()), start, losses)
    return losses


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_logged_losses_equal_the_oracle_on_every_world_size(name, world_size):
    steps, epoch = logged(world_size)[name]
    assert steps == pytest.approx(expected(name), rel=1e-5)
    assert epoch == pytest.approx(sum(expected(name)) / len(steps), rel=1e-5)
