"""Runs, stores, exports and checkpoints of earlier versions stay usable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
from old_runs import unpack_old_run
from training_runs import largest_difference, parameters
from worlds import run_world

from kge_torchrec import api, load_model


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)  # its config names data and folder from there
    return unpack_old_run(tmp_path)


def expected(run: Path) -> dict:
    return json.loads((run.parent / "expected.json").read_text())


def test_old_run_can_be_evaluated_queried_and_exported(run):
    with api.open_run(run) as opened:
        assert opened.evaluate() == opened.results["test"] == expected(run)["test"]
        answers = opened.predict(head="e1", relation="r0", k=3)
        opened.export(run.parent / "new-export")
    old, new = (load_model(run.parent / name) for name in ("export", "new-export"))
    assert old.predict(head="e1", relation="r0", k=3) == answers
    assert (old.entities == new.entities).all()


def rank_resumes(run: str) -> dict:
    with api.resume(run, {"train.epochs": 4}) as opened:
        return opened.results["test"], parameters(opened.model)


# Its scores were matrix products of copied rows; kernels since then round the last bit otherwise.
@pytest.mark.parametrize("world_size, tolerance", [(2, 1e-6), (1, 1e-5)])
def test_old_run_resumes_to_its_recorded_results(run, world_size, tolerance):
    results, actual = run_world(world_size, rank_resumes, "run")[0]
    recorded_parameters = safetensors.torch.load_file(
        run.parent / "resumed_to_4_epochs.safetensors"
    )
    assert largest_difference(recorded_parameters, actual) <= tolerance
    for side, kinds in expected(run)["test_of_4_epochs"].items():
        mrr = kinds["realistic"]["mrr"]
        assert results[side]["realistic"]["mrr"] == pytest.approx(mrr, abs=1e-5)
