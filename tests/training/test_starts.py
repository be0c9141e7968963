"""Where a run may start: new, resumed, locked and used folders, and what a failed start leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_runs import config_of, random_triples

from kge_torchrec import Loss, api
from kge_torchrec.config import ConfigError
from kge_torchrec.training.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]


class Fails(Loss):
    """Fails in the third step."""

    steps = 0

    def forward(self, positive, query, negative, mask):
        if positive.requires_grad:
            type(self).steps += 1
        if type(self).steps > 4:  # two sides per step
            type(self).steps = 0
            raise RuntimeError("a mistake in the loss")
        return torch.nn.functional.softplus((negative * mask).mean(-1) - positive)


FAILS = {"loss__name": f"{__name__}:Fails"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fail(config, *callbacks) -> None:
    with pytest.raises(RuntimeError, match="a mistake in the loss"):
        api.train(config, callbacks)


# run.resume


def test_resume_auto_starts_and_resumes(store, tmp_path):
    run = api.train(config_of(store, tmp_path / "run", run__resume="auto"))
    lines = run.history
    again = api.train(config_of(store, tmp_path / "run", run__resume="auto", threads=2))
    assert again.history[:-1] == lines[:-1]


@pytest.mark.parametrize(
    "resume, changes, words",
    [
        ("auto", {"train__lr": 0.5}, "a different config: train.lr is 0.05 there and 0.5 here"),
        ("require", {"seed": 9}, "a different config: seed is 0 there and 9 here"),
    ],
)
def test_run_of_another_config_is_not_changed(store, tmp_path, resume, changes, words):
    config = config_of(store, tmp_path / "run", train__epochs=0)
    RunFolder(tmp_path / "run").create(config)
    before = (tmp_path / "run" / "config.yaml").read_text()
    again = config_of(store, tmp_path / "run", run__resume=resume, train__epochs=0, **changes)
    with pytest.raises(ConfigError, match=words):
        api.train(again)
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_resume_require_needs_an_existing_run(store, tmp_path):
    with pytest.raises(ConfigError, match=r"run.resume require: .* holds no run"):
        api.train(config_of(store, tmp_path / "run", run__resume="require"))
    with pytest.raises(ConfigError, match=r"run.resume auto needs run.dir"):
        config_of(store, None, run__resume="auto")


# One folder, one live run


def test_second_run_in_a_folder_names_the_first(store, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run = api.train(config_of(store, folder.path, train__epochs=1))
    words = rf"is being trained by process {os.getpid()} on \S+, since 20"
    with folder.locked():
        run.evaluate()  # reading is free
        for start in (
            lambda: api.train(config_of(store, folder.path)),
            lambda: api.train(config_of(store, folder.path, run__resume="auto")),
            lambda: api.resume(run.path),
        ):
            with pytest.raises(ConfigError, match=words):
                start()


def test_lock_is_released_when_its_process_ends(tmp_path):
    code = (
        "import os, sys, time; from kge_torchrec.training.run_folder import RunFolder\n"
        f"with RunFolder({str(tmp_path)!r}).locked():\n"
        "    print('locked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.readline() == b"locked\n"
    with (
        pytest.raises(ConfigError, match=f"process {process.pid} on"),
        RunFolder(tmp_path).locked(),
    ):
        pass
    process.kill()
    process.wait()
    with RunFolder(tmp_path).locked():
        pass


def test_two_starts_in_one_second_have_folders_of_their_own(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20261128-010203")
    config = config_of(store, model__scorer="distmult", train__epochs=0)
    folders = [RunFolder.new(config).path.name for _ in range(3)]
    assert folders == [f"distmult-20261128-010203{end}" for end in ("", "-2", "-3")]


# Starts that failed or were killed


def test_second_start_repeats_the_first_error(tmp_path):
    """The folder is gone, with config, prepared store, plan and trackers."""
    lines = ["\t".join(triple) for triple in random_triples(37, 3, 130)]
    (tmp_path / "train.tsv").write_text("\n".join(lines))
    trackers = {"run__trackers__tensorboard": True}
    for _ in range(2):
        fail(config_of(tmp_path / "train.tsv", tmp_path / "run", **trackers, **FAILS))
        assert not (tmp_path / "run").exists()
    write = lambda kind, values: (tmp_path / "run" / "mine").write_text(kind)  # noqa: E731
    fail(config_of(tmp_path / "train.tsv", tmp_path / "run", train__log_every=1, **FAILS), write)
    assert names(tmp_path / "run") == {"mine"}


def test_folder_of_a_failed_start_takes_the_same_command(store, tmp_path, capsys):
    """A folder that was there before stays, with the user's files; the next start clears it."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    (run.path / "notes.txt").write_text("mine")
    fail(config_of(store, run.path, **FAILS))
    assert {"config.yaml", "notes.txt", "metrics.jsonl"} <= names(run.path)
    api.train(config_of(store, run.path)).close()
    assert "ended before its first checkpoint; starting anew" in capsys.readouterr().err
    assert [line["step"] for line in run.load_metrics()] == [5, 5, 5, 10, 10, 10, 10]
    assert (run.path / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="already holds a run"):
        api.train(config_of(store, run.path))


def test_run_that_fails_after_a_checkpoint_stays(store, tmp_path):
    def fail(kind, values):
        if values.get("epoch") == 2:
            raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        api.train(config_of(store, tmp_path / "run", checkpoint__every__epochs=1), [fail])
    assert {"config.yaml", "metrics.jsonl", "checkpoints"} <= names(tmp_path / "run")


def test_config_of_a_user_in_the_folder_of_a_run_is_kept(store, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("# mine\nseed: 1\n")
    for _ in range(2):  # the first start leaves its lock
        with pytest.raises(ConfigError, match="already holds a run"):
            api.train(config_of(store, tmp_path / "run"))
        assert (tmp_path / "run" / "config.yaml").read_text().startswith("# mine")
