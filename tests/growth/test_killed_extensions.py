"""Extensions that are killed: started over, or resumed to what they would have given."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from grown_runs import base_run, new_triples, tensors
from worlds import WorldError, run_world

from kge_torchrec import api, extend
from kge_torchrec.cli import main
from kge_torchrec.errors import KGEError

# Where the process dies, in order: the name of a function, and on which of its calls.
# Every way to resume, at its first and at its last moment.
STAGES = {
    "while the store is written": ("kge_torchrec.data.prepare.finish_store", 1),
    "before there is a checkpoint": ("kge_torchrec.training.checkpoints.Checkpoints.save", 1),
    "before training": ("kge_torchrec.training.trainer.Trainer.run", 1),
    "at the end of an epoch": ("kge_torchrec.training.trainer.Trainer._end_epoch", 2),
}
BEFORE_A_RUN, BEFORE_A_CHECKPOINT = list(STAGES)[:2]
GIVEN = {"epochs": 3, "overrides": {"checkpoint.every.epochs": 1}}


def dies(run: Path, output: Path, place: str, call: int, options: dict = GIVEN) -> None:
    """Extends; this process ends in the call-th call of a function."""
    import_module("kge_torchrec.growth")
    calls = []

    def die(*_, **__):
        calls.append(place)
        if len(calls) == call:
            os._exit(9)
        return right(*_, **__)

    owner, _, name = place.rpartition(".")
    head, _, kind = owner.rpartition(".")
    owner = getattr(sys.modules[head], kind) if kind[0].isupper() else sys.modules[owner]
    right = getattr(owner, name)
    setattr(owner, name, die)
    extend(run, new_triples(), output, **options)


def killed(output: Path, stage: str) -> None:
    with pytest.raises(WorldError, match="exit code 9"):
        run_world(1, dies, base_run(), output, *STAGES[stage])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return extend(base_run(), new_triples(), tmp_path_factory.mktemp("whole") / "run", **GIVEN).path


def same(one: Path, other: Path) -> None:
    """Every number of the newest checkpoints, and the results."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    mine, its = (json.loads((run / "results.json").read_text()) for run in (one, other))
    assert mine["test"] == its["test"]
    assert mine["extended"]["new"] == its["extended"]["new"]


@pytest.mark.parametrize("stage", STAGES)
def test_killed_extension_matches_uninterrupted_extension(whole, tmp_path, capsys, stage):
    output = tmp_path / "run"
    killed(output, stage)
    assert output.is_dir() and not (output / "results.json").exists()
    if stage == BEFORE_A_RUN:
        for verb in (["train", "--resume"], ["evaluate"]):
            assert main([*verb, str(output)]) == 1
            assert "repeat the same command, which starts over" in capsys.readouterr().err
        extend(base_run(), new_triples(), output, **GIVEN)
    elif stage == BEFORE_A_CHECKPOINT:
        both = shutil.copytree(output, tmp_path / "both")
        api.resume(output)
        extend(base_run(), new_triples(), both, **GIVEN)
        same(both, whole)
    else:
        with pytest.raises(KGEError, match="already holds a run; resume the run with"):
            extend(base_run(), new_triples(), output, **GIVEN)
        api.resume(output)
    same(output, whole)


def test_extension_without_checkpoints_is_not_trained_from_scratch(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(KGEError, match=r"all checkpoints of .* are missing"):
        api.resume(run)
    api.resume(run, force=True)
    same(run, whole)


def test_failed_restart_may_be_repeated(whole, tmp_path):
    output = tmp_path / "run"
    killed(output, "before there is a checkpoint")
    with pytest.raises(KGEError, match="no checkpoint 'step-9'"):
        extend(base_run(), new_triples(), output, checkpoint="step-9")
    with pytest.raises(KGEError, match="none of the triples is new"):
        extend(base_run(), {"train": [next(iter(old_triples()))]}, output)
    extend(base_run(), new_triples(), output, **GIVEN)
    same(output, whole)


def old_triples():
    store = api.open_run(base_run()).model.store
    head, relation, tail = map(int, store.train[0])
    yield store.entities[head], store.relations[relation], store.entities[tail]


@pytest.mark.slow
def test_extension_survives_kills(tmp_path):
    """`kge-torchrec extend` killed at random moments, then what its last words ask for."""
    run, new = base_run(), tmp_path / "new.tsv"
    new.write_text("".join("\t".join(row) + "\n" for row in new_triples()["train"]))
    command = [sys.executable, "-m", "kge_torchrec", "extend", str(run), str(new), "--epochs", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    subprocess.run([*command, "-o", str(tmp_path / "whole")], check=True, env=environment)
    seconds, draw = time.monotonic() - started, random.Random(0)
    for turn in range(4):
        output = tmp_path / f"run{turn}"
        process = subprocess.Popen([*command, "-o", str(output)], env=environment)
        time.sleep(seconds * draw.uniform(0.3, 1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if main(["train", "--resume", str(output)]):
            subprocess.run([*command, "-o", str(output)], check=True, env=environment)
        same(output, tmp_path / "whole")
