"""One engine resumes the checkpoints of the other; test_exact compares both with the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import config_of, largest_difference, rank_trains, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.row_gradients import TableRows

ADAM = {"entities__engine": "handrolled", "train__optimizer": "adam", "train__lr": 0.02}


def trained(world_size: int, store: Path, folder: Path, changes: dict) -> dict:
    """Rank 0's parameters after training or resuming; all ranks have the same."""
    first, *others = run_world(world_size, rank_trains, store, folder, changes)
    assert all(largest_difference(first, other) == 0 for other in others)
    return first


@pytest.mark.parametrize(
    ("optimizer", "lr", "first", "then", "sizes"),
    [
        ("rowwise_adagrad", 0.05, ("handrolled", 2), ("torchrec", 1), {}),
        ("adam", 0.01, ("torchrec", 1), ("handrolled", 4), {}),
        # more ranks than entities
        ("rowwise_adam", 0.01, ("handrolled", 4), ("torchrec", 4),
         {"entities": 3, "relations": 4, "train": 6, "held_out": 1}),
    ],
)  # fmt: skip
def test_checkpoint_of_one_engine_resumes_in_the_other(tmp_path, optimizer, lr, first, then, sizes):
    store = tiny_store(tmp_path / "store", **sizes).path
    changes = {"train__optimizer": optimizer, "train__lr": lr, "train__batch_size": 8,
               "train__optimizer_options__eps": 1e-3}  # fmt: skip
    for (engine, world_size), epochs in ((first, 2), (then, 4)):
        more = {"entities__engine": engine, "train__epochs": epochs}
        actual = trained(world_size, store, tmp_path / "run", changes | more)
    expected = trained(1, store, tmp_path / "whole", changes | {"train__epochs": 4})
    assert largest_difference(actual, expected) < 1e-5


def test_error_in_the_thread_ends_training(store, tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("the table's step found no memory")

    monkeypatch.setattr(TableRows, "step_part", fail)
    config = config_of(store, tmp_path / "run", **ADAM, entities__preset="dicee")
    with pytest.raises(MemoryError, match="found no memory"):
        api.train(config)


@pytest.mark.parametrize(("preset", "world_size"), [("dicee", 2), ("dgl", 1)])
def test_presets_differ_learn_and_resume_bitwise(store, tmp_path, preset, world_size):
    changes = {**ADAM, "entities__preset": preset}
    whole = trained(world_size, store, tmp_path / "whole", changes)
    half = trained(world_size, store, tmp_path / "run", {**changes, "train__epochs": 1})
    assert largest_difference(whole, half) > 0.05
    assert largest_difference(whole, trained(world_size, store, tmp_path / "run", changes)) == 0
    usual = trained(world_size, store, tmp_path / "usual", ADAM)
    assert largest_difference(whole, usual) > 1e-3


def test_preset_cannot_change_on_resume(store, tmp_path):
    """It defines what the states in a checkpoint mean."""
    run = api.train(config_of(store, tmp_path / "run", train__epochs=1, **ADAM))
    with pytest.raises(ConfigError, match=r"entities\.preset is .* in this run and cannot change"):
        api.resume(run.path, {"entities.preset": "dgl"})
    run.close()
