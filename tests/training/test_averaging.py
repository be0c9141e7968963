"""The average of the weights: against a dense oracle, and wherever a model is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle_training import train_dense
from training_runs import config_of, fit, largest_difference, parameters, small_store
from worlds import run_world

from kge_torchrec import api, load_model
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.trainer import Trainer

EMA = {"train__averaging": "ema", "train__averaging_options": {"decay": 0.3}}
EMA_OF_STEPS = {"train__averaging": "ema",
                "train__averaging_options": {"decay": 0.9, "every_steps": 3}}  # fmt: skip
HANDROLLED = {"entities__engine": "handrolled"}
EPOCHS = {"checkpoint__every__steps": 0}  # no checkpoints within them, for speed


def rank_trains(run: Path, changes: dict[str, Any]) -> dict:
    """Train; return the averages, the raw weights, the start and the progress."""
    kept: dict[str, Any] = {}

    def prepare(loop: Trainer) -> None:
        session, run_all = loop.session, loop.run
        kept["start"] = parameters(session)

        def run_and_keep():
            kept["progress"] = run_all()
            kept["average"] = parameters(session)
            session.averaging.clear()
            kept["raw"] = parameters(session)

        loop.run = run_and_keep

    config = {"train__epochs": 7, "train__lr": 0.1, **EPOCHS, **changes}
    fit(config_of(small_store(), run, **config), prepare)
    return kept


def ema_of(weights: list[dict], decay: float) -> dict:
    average = weights[0]
    for number, new in enumerate(weights[1:], 1):
        stays = min(decay, (1 + number) / (10 + number))
        average = {key: stays * average[key] + (1 - stays) * new[key] for key in new}
    return average


@pytest.mark.parametrize("world_size", [1, 2])
def test_averages_equal_the_dense_oracle(tmp_path, world_size):
    weights: list[dict] = []
    for name, changes in (("ema", EMA), ("steps", EMA_OF_STEPS)):
        engine = HANDROLLED if name == "steps" else {}
        dense = {"dense__wrapper": "fsdp"} if name == "ema" and world_size > 1 else {}
        changes = {**changes, **engine, **dense, "model__scorer": "distmult"}
        ranks = run_world(world_size, rank_trains, tmp_path / name, changes)
        if not weights:
            config = config_of(
                small_store(), train__epochs=7, train__lr=0.1, model__scorer="distmult"
            )
            train_dense(
                config,
                TripleStore.open(small_store()),
                ranks[0]["start"],
                watch=lambda now: weights.append({key: w.clone() for key, w in now.items()}),
            )
        epochs = weights[4::5]  # five steps per epoch
        expected = ema_of(epochs, 0.3) if name == "ema" else ema_of(weights[2::3], 0.9)
        for results in ranks:
            assert largest_difference(results["raw"], epochs[-1]) < 1e-5
            assert largest_difference(results["average"], expected) < 1e-5
        assert largest_difference(results["raw"], results["average"]) > 0.01
    assert ranks[0]["progress"].averaged == 11  # of 35 steps


def test_average_does_not_change_training(tmp_path):
    often = {**HANDROLLED, "evaluation__every": 1}
    plain = rank_trains(tmp_path / "none", often)["raw"]
    averaged = rank_trains(tmp_path / "ema", {**EMA, **often})["raw"]
    assert largest_difference(averaged, plain) == 0


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> api.Run:
    """A run whose average differs from its raw weights."""
    folder = tmp_path_factory.mktemp("averaged")
    config = {**EMA, **HANDROLLED, "train__lr": 0.1, "train__epochs": 4}
    return api.train(config_of(small_store(), folder / "run", **config))


def test_every_use_of_a_run_reads_the_average(averaged, tmp_path):
    rows = averaged.entities
    assert averaged.evaluate("test") == averaged.results["test"]
    session = fit(averaged.config)  # it has ended, so it only restores
    assert np.array_equal(session.parameters["entities"], rows)
    assert not np.array_equal(session.backend.shard().rows, rows)
    assert np.array_equal(load_model(averaged.export(tmp_path / "export")).entities, rows)


def test_best_average_is_the_one_that_was_validated(tmp_path):
    best = {}

    def watch(loop: Trainer) -> None:
        session = loop.session
        values = iter([0.1, 0.9, 0.3])  # the second is the best

        def validate():
            with session.trained_model() as model:
                value = next(values)
                best[value] = model.rows(torch.arange(model.num_entities)).clone()
            return {"both": {"realistic": {"mrr": value}}}

        session.validate = validate

    config = {**EMA, **HANDROLLED, "evaluation__every": 1, "train__lr": 0.1, "train__epochs": 3}
    with processes("cpu"):  # the session outlives its training here
        session = fit(config_of(small_store(), tmp_path, **config), watch)
        assert largest_difference({"": best[0.3]}, {"": session.parameters["entities"]}) == 0
        session.restore_parameters()
        with session.trained_model() as model:
            restored = model.rows(torch.arange(model.num_entities))
    assert torch.equal(restored, best[0.9])
