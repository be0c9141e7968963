"""torch.compile of scorer and loss gives the same run."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from training_runs import config_of, fit, largest_difference, without_checkpoints
from worlds import run_world


def train(store: Path, folder: Path, compiled: bool, **changes) -> dict:
    config = config_of(store, folder / str(compiled), dense__compile=compiled, train__epochs=2,
                       train__optimizer="adam", **changes)  # fmt: skip
    return fit(config, without_checkpoints).parameters


@pytest.mark.slow
@pytest.mark.parametrize("scorer, precision", [("complex", "bf16"), ("transe_l1", "fp32")])
def test_traced_parts_train_to_the_same_parameters(store, tmp_path, monkeypatch, scorer, precision):
    """Traced as for inductor, whose compiler would take most of the time, and without breaks."""
    torch._dynamo.reset()
    traced = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", traced)
    changes = {"train__precision": precision, "loss__n3": 0.01, "negatives__chunk_size": 8}
    changes["model__scorer"] = scorer
    plain, compiled = (train(store, tmp_path, flag, **changes) for flag in (False, True))
    assert largest_difference(plain, compiled) < (1e-5 if precision == "fp32" else 0.02)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def rank_trains(store: Path, folder: Path, changes: dict) -> tuple[dict, dict]:
    plain, compiled = (train(store, folder, flag, **changes) for flag in (False, True))
    return plain, compiled


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "world_size"), [("auto", 1), ("fsdp", 2)])
def test_compiled_parts_train_to_the_same_parameters_under_every_wrapper(
    store, tmp_path, wrapper, world_size
):
    changes = {"dense__wrapper": wrapper, "train__accumulation": 2}
    for plain, compiled in run_world(world_size, rank_trains, store, tmp_path, changes,
                                     timeout=280):  # fmt: skip
        assert largest_difference(plain, compiled) < 1e-5
