"""Batches that leave ranks without triples, and tables that leave them without rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import config_of, fit, largest_difference, rank, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.training.run_folder import RunFolder

SETTINGS = {
    "fewer triples than ranks": ({"entities": 5, "train": 3}, {}),
    "a last batch smaller than the world": ({"train": 34}, {}),
    "batches of one": ({"train": 9}, {"train__batch_size": 1, "negatives__chunk_size": 1}),
    "more ranks than entities": ({"entities": 3, "train": 12, "held_out": 3}, {}),
    "one entity a rank and none left": ({"entities": 4, "train": 20, "held_out": 4}, {}),
}


def options(name: str) -> dict:
    return {"train__optimizer": "rowwise_adam", "train__epochs": 2, "evaluation__every": 1,
            "checkpoint__every__steps": 3} | SETTINGS[name][1]  # fmt: skip


def rank_trains_and_ranks(store: Path, run: Path, changes: dict) -> dict:
    """A whole run; then its results, ranked again, and its parameters."""
    config = config_of(store, run, **changes)
    if rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        RunFolder(run).save_config(config)
    result = fit(config)
    with api.open_run(run) as trained:
        again = trained.evaluate()
        best = trained.predict(relation="r0", tail="e1", k=50)
    return {"parameters": result.parameters, "answers": len(best), "test": again}


# "batches of one" is both of them at once, step after step.
SLOW = (
    "fewer triples than ranks", "a last batch smaller than the world", "more ranks than entities",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SETTINGS]
)
@pytest.mark.first_tier("one entity a rank and none left")
@pytest.mark.slow
def test_four_ranks_equal_one(tmp_path, name):
    store = tiny_store(tmp_path / "store", **SETTINGS[name][0])
    results = {}
    for world_size in (1, 4):
        run = tmp_path / f"run{world_size}"
        ranks = run_world(world_size, rank_trains_and_ranks, store.path, run, options(name))
        results[world_size] = ranks[0]
    assert largest_difference(results[1]["parameters"], results[4]["parameters"]) < 1e-5
    assert results[1]["answers"] == results[4]["answers"] == store.num_entities
    for side, ties in results[1]["test"].items():
        for tie, values in ties.items():
            assert results[4]["test"][side][tie] == pytest.approx(values, abs=1e-6)


def rank_resumes(run: Path, epochs: int) -> dict:
    again = api.resume(run, {"train.epochs": epochs})
    again.close()
    return fit(again.config).parameters


@pytest.mark.slow  # tests/training/test_engines.py has it with both engines
def test_more_ranks_than_entities_resume(tmp_path):
    name = "more ranks than entities"
    store = tiny_store(tmp_path / "store", **SETTINGS[name][0])
    uninterrupted = run_world(1, rank_trains_and_ranks, store.path, tmp_path / "whole",
                      options(name) | {"train__epochs": 4})  # fmt: skip
    run_world(4, rank_trains_and_ranks, store.path, tmp_path / "run", options(name))
    run_world(2, rank_resumes, tmp_path / "run", 3)
    results = run_world(4, rank_resumes, tmp_path / "run", 4)
    assert largest_difference(uninterrupted[0]["parameters"], results[3]) < 1e-5
