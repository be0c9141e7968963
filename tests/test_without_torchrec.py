"""The hand-rolled engine, ranking and prediction where TorchRec and FBGEMM are not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import QUIET

from kge_torchrec import api

PROGRAM = Path(__file__).with_name("without_torchrec.py")
HANDROLLED = {**QUIET, "data.path": "countries", "entities.engine": "handrolled", "model.dim": 16,
              "train.epochs": 2, "evaluation.every": 1, "train.batch_size": 256}  # fmt: skip


def call(*words: str, launcher: tuple[str, ...] = (), code: int = 0) -> str:
    """Return the output of a verb."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launcher, str(PROGRAM), *words], env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == code, done.stderr[-2000:]
    return done.stdout if code == 0 else done.stderr


def flags(**changes: object) -> list[str]:
    keys = {**HANDROLLED, **{key.replace("__", "."): value for key, value in changes.items()}}
    return [f"--{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in keys.items()]


@pytest.mark.slow
def test_run_without_torchrec_equals_run_with_it(tmp_path):
    call("train", *flags(run__dir=str(tmp_path / "without")))
    with api.train({**HANDROLLED, "run.dir": str(tmp_path / "with")}) as run:
        expected = run.results["test"]
    results = json.loads((tmp_path / "without" / "results.json").read_text())
    assert results["test"]["both"]["realistic"] == pytest.approx(expected["both"]["realistic"])
    assert "hand-rolled" in (tmp_path / "without" / "plan.txt").read_text()
    assert "Germany" in call("predict", str(tmp_path / "without"), "--head", "Austria",
                             "--relation", "borders", "--top", "700")  # fmt: skip


@pytest.mark.slow
def test_torchrec_engine_reports_missing_packages(tmp_path):
    words = flags(run__dir=str(tmp_path / "run"), entities__engine="torchrec")
    said = call("train", *words, code=1)
    assert "entities.engine torchrec needs torchrec and fbgemm" in said
    assert "entities.engine handrolled" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["1vsall", "kvssample"])
def test_several_ranks_train_every_regime_without_torchrec(tmp_path, regime):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    folder = tmp_path / "run"
    count = 6 if regime == "kvssample" else None
    call("train", *flags(run__dir=str(folder), negatives__regime=regime, negatives__count=count,
                         train__lr=0.1), launcher=launcher)  # fmt: skip
    assert json.loads((folder / "results.json").read_text())["train"]["world_size"] == 2
    for verb in (["evaluate", str(folder)], ["export", str(folder), "-o", str(tmp_path / "out")]):
        call(*verb)
