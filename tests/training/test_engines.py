"""Checkpoints of one engine, wrapper and number of ranks resume in others; presets."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import config_of, largest_difference, rank_trains, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.row_gradients import TableRows

HANDROLLED = {"entities__engine": "handrolled"}
ADAM = {**HANDROLLED, "train__optimizer": "adam", "train__lr": 0.02}
FULL = {"negatives__regime": "1vsall", "train__clip__norm": 0.1, "train__clip__value": 0.01,
        "model__scorer": "keci", "loss__relation_weight": 0.5, "loss__n3": 0.01}  # fmt: skip
FSDP = {"dense__wrapper": "fsdp"}
HYBRID = {"dense__wrapper": "hybrid", "dense__options__replicas": 2}
OFFLOAD = {**FSDP, "dense__options__cpu_offload": True}


def in_parts(count: int) -> dict:
    return {"train__accumulation": count}


def trained(world_size: int, store: Path, folder: Path, changes: dict) -> dict:
    """Rank 0's parameters after training or resuming; all ranks have the same."""
    first, *others = run_world(world_size, rank_trains, store, folder, changes)
    assert all(largest_difference(first, other) == 0 for other in others)
    return first


# Optimizer and what both have; ranks and settings before, and after.
RESUMES = {
    "engines": ("rowwise_adagrad", {"train__lr": 0.05}, (2, {**HANDROLLED, **in_parts(3)}),
                (1, in_parts(2))),
    "more ranks than entities": ("rowwise_adam", {}, (4, HANDROLLED), (4, {})),
    "1vsall": ("adam", FULL, (2, {**FSDP, **in_parts(2)}), (1, HANDROLLED)),
    "1vsall hybrid": ("adam", FULL, (4, {**HYBRID, **HANDROLLED, **in_parts(2)}), (2, FSDP)),
    "kvsall": ("adam", {"negatives__regime": "kvsall", "model__dropout__hidden": 0.2},
               (2, HANDROLLED), (1, {})),
    "kvssample": ("adam", {"negatives__regime": "kvssample"}, (1, {}), (2, {})),
    "offload": ("adam", {"train__optimizer_options__weight_decay": 0.02}, (4, HYBRID),
                (2, OFFLOAD)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMES)
def test_runs_resume_elsewhere_in_the_middle_of_an_epoch(tmp_path, name):
    few = {"entities": 3, "relations": 4, "train": 6, "held_out": 1}
    sizes = few if name.startswith("more ranks") else {}
    store = tiny_store(tmp_path / "store", **sizes).path
    optimizer, shared, (ranks, before), (next_ranks, after) = RESUMES[name]
    shared = {"train__optimizer": optimizer, "train__lr": 0.01, "train__epochs": 2,
              "train__batch_size": 2 if sizes else 32, "checkpoint__every__steps": 2,
              "checkpoint__every__epochs": 0, "train__optimizer_options__eps": 1e-3,
              **shared}  # fmt: skip
    trained(ranks, store, tmp_path / "run", shared | before)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    for file in newest.iterdir():  # the one before is from the middle of an epoch
        file.unlink()
    newest.rmdir()
    resumed = trained(next_ranks, store, tmp_path / "run", shared | after)
    whole = trained(1, store, tmp_path / "whole", shared)
    assert largest_difference(resumed, whole) < 1e-5


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
