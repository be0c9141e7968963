"""Runs that end before their time and are started again: by hand, by a scheduler, by torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import (
    config_of,
    fit,
    in_step,
    largest_difference,
    parameters,
    rank,
    rank_resumes,
)
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training import runs, stop_signal
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.stop_signal import StopSignal, TrainingInterrupted, TrainingStopped
from kge_torchrec.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


# Signals


def rank_is_stopped(store: Path, run: Path, step: int, who: int, number: int) -> str:
    if number == signal.SIGINT:  # which a shell's background jobs ignore
        signal.signal(number, signal.default_int_handler)
    before = signal.getsignal(number)
    kind = TrainingInterrupted if number == signal.SIGINT else TrainingStopped
    with pytest.raises(kind, match=re.escape(f"Resume with `train --resume {run}`")) as caught:
        act = lambda loop: os.kill(os.getpid(), number) if rank() == who else None  # noqa: E731
        fit(config_of(store, run), in_step(step - 1, act))
    assert signal.getsignal(number) == before
    return str(caught.value)


@pytest.mark.parametrize(
    "world_size, step, who, number",
    [
        (1, 10, 0, signal.SIGTERM),  # the last step of an epoch
        (2, 7, 1, signal.SIGINT),
        (1, 7, 0, signal.SIGUSR1),
    ],
)
def test_signal_to_any_rank_stops_all_after_a_checkpoint(
    store, tmp_path, world_size, step, who, number
):
    arguments = (store, tmp_path / "run", step, who, number)
    messages = run_world(world_size, rank_is_stopped, *arguments)
    (name,) = set(re.findall(r"step-\d+", " ".join(messages)))
    assert (tmp_path / "run" / "checkpoints" / name / "manifest.json").is_file()
    # Several ranks ask each other now and then, at the latest after an epoch.
    assert step <= int(name.split("-")[1]) <= (step if world_size == 1 else 10)


def rank_asks(steps: int, pause: float) -> tuple[list[bool], int]:
    agreements = 0

    class Counting(StopSignal):
        def now(self) -> bool:
            nonlocal agreements
            agreements += 1
            return super().now()

    answers = []
    with processes("cpu") as ranks, Counting(ranks) as stop:
        for step in range(steps):
            time.sleep(pause)
            if step == steps // 2 and rank() == 1:
                signal.raise_signal(signal.SIGTERM)
            answers.append(stop.after_step())
        answers.append(stop.now())
    return answers, agreements


def test_ranks_agree_about_once_per_second(monkeypatch):
    results = run_world(2, rank_asks, 300, 0.005)
    assert results[0] == results[1]
    answers, agreements = results[0]
    assert answers[-1] and not any(answers[:150]) and agreements < 20
    assert stop_signal.EXIT_CODE == 75


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])  # torchrun's second is SIGTERM
def test_second_ctrl_c_ends_at_once(second, ctrl_c, capfd):
    with processes("cpu") as ranks:
        with pytest.raises(KeyboardInterrupt), StopSignal(ranks, "a note") as stop:
            ctrl_c()
            assert stop.after_step() and stop.is_interrupt
            signal.raise_signal(second)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
        # ranks hear the first one twice, from the terminal and from torchrun
        with StopSignal(replace(ranks, world_size=2)):
            ctrl_c()
            try:
                ctrl_c()
            except KeyboardInterrupt:  # which would end pytest
                pytest.fail("one Ctrl-C was taken for two")
    assert capfd.readouterr().err == "a note"


def test_own_ctrl_c_handler_is_kept(ctrl_c):
    heard = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    with processes("cpu") as ranks, StopSignal(ranks) as stop:
        ctrl_c()
        assert not stop.after_step()
    assert heard == [signal.SIGINT]


@pytest.mark.parametrize("when", ["after the last step", "at the last checkpoint", "while ranking"])
def test_ctrl_c_in_python_names_the_folder(store, tmp_path, monkeypatch, ctrl_c, when):
    """Ranks have agreed to end anyway after the last step; test is not ranked then."""
    save, callbacks = Trainer._save, []
    if when == "after the last step":
        callbacks.append(lambda heard, values: heard == "epoch" and ctrl_c())
    elif when == "at the last checkpoint":
        monkeypatch.setattr(Trainer, "_save", lambda loop, ends: (save(loop, ends), ctrl_c()))
    else:
        monkeypatch.setattr(runs, "_results", lambda *_: ctrl_c())
    config = config_of(store, tmp_path / "run", train__epochs=1)
    with pytest.raises(TrainingInterrupted, match=f"esume with `train --resume {tmp_path}/run`."):
        api.train(config, callbacks)
    assert not (tmp_path / "run" / "results.json").exists()
    monkeypatch.undo()
    assert api.resume(tmp_path / "run").results["train"]["epochs"] == 1


def test_other_threads_train_without_handlers(store, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=fit, args=(config_of(store, tmp_path, train__epochs=1),))
    thread.start()
    thread.join()
    assert (tmp_path / "checkpoints").is_dir() and signal.getsignal(signal.SIGTERM) == before


# The real thing

LONG = {"train__epochs": 40, "train__batch_size": 256, "model__dim": 16, "evaluation__every": 10,
        "checkpoint__every__steps": 3}  # fmt: skip


def start(arguments: list[str], restarts: int = 0, ranks: int = 2) -> subprocess.Popen:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                f"--max-restarts={restarts}", "--monitor-interval=0.1"]  # fmt: skip
    command = [*(torchrun if ranks > 1 else []), "-m", "kge_torchrec", "train", *arguments]
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def checkpoints(run: Path) -> list[str]:
    return sorted(path.parent.name for path in run.glob("checkpoints/step-*/manifest.json"))


def process_of_rank(number: int, launcher: int) -> int | None:
    """The process id of a rank that torchrun started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == launcher and f"RANK={number}".encode() in environment:
            return int(folder.name)
    return None


def kill_after_a_checkpoint(process: subprocess.Popen, run: Path, number: int, sign: int) -> None:
    """Sends a rank a signal once it has written a checkpoint that was not there before."""
    before, deadline = checkpoints(run)[-1:], time.monotonic() + 100
    while checkpoints(run)[-1:] == before:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    pid = process_of_rank(number, process.pid)
    assert pid is not None
    os.kill(pid, sign)


def ended(process: subprocess.Popen, timeout: float = 200) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=timeout)
        return process.returncode, errors
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def rank_trains(folder: Path, config) -> dict:
    return parameters(api.train(config).model)


def rank_reads(run: Path) -> dict:
    with processes("cpu") as ranks:
        folder = RunFolder(run)
        session = Session(folder.load_config(), folder, ranks)
        session.restore()
        return parameters(session)


@pytest.mark.slow
def test_rank_killed_twice_matches_uninterrupted_run(tmp_path):
    config = config_of("countries", tmp_path / "run", run__resume="auto", **LONG)
    config.save(tmp_path / "config.yaml")
    process = start([str(tmp_path / "config.yaml")], restarts=3)
    for number in (1, 0):
        kill_after_a_checkpoint(process, tmp_path / "run", number, signal.SIGKILL)
    code, errors = ended(process)
    assert code == 0, errors
    ours = [line for line in errors.splitlines() if line.startswith("kge-torchrec: ")]
    assert any("another rank died or cannot be reached" in line for line in ours)
    assert "gloo" not in errors and "Traceback" not in errors.split("torch/distributed")[0]
    run_world(2, rank_trains, tmp_path, config_of("countries", tmp_path / "whole", **LONG))
    uninterrupted, again = (
        run_world(2, rank_reads, tmp_path / name)[0] for name in ("whole", "run")
    )
    assert largest_difference(uninterrupted, again) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["test"] == json.loads((tmp_path / "whole" / "results.json").read_text())["test"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_of_a_scheduler_stops_the_command(tmp_path, number):
    config = config_of("countries", tmp_path / "run", **LONG)
    config.save(tmp_path / "config.yaml")
    process = start([str(tmp_path / "config.yaml")], ranks=1)
    while not checkpoints(tmp_path / "run"):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    code, errors = ended(process)
    assert code == 75, errors
    assert re.search(r"stopped by a signal; checkpoint (step-\d+) is written", errors)
    newest = checkpoints(tmp_path / "run")[-1]
    assert newest in errors and "Traceback" not in errors
    stopped = tmp_path / "run" / "stopped.json"  # torchrun would change the exit code
    assert json.loads(stopped.read_text()) == {"checkpoint": newest}
    process = start([str(tmp_path / "config.yaml"), "--train.epoch", "3"], ranks=1)
    assert ended(process)[0] == 1  # a misspelled key
    process = start(["--resume", str(tmp_path / "run"), "--train.epochs", "1"], ranks=1)
    assert ended(process)[0] == 0 and not stopped.exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks, to", [(1, "terminal"), (2, "terminal"), (2, "torchrun")])
def test_ctrl_c_on_the_command_line_keeps_progress(tmp_path, ranks, to, ctrl_c):
    """A terminal sends SIGINT to every process of the group; torchrun sends it on to its ranks."""
    keys = {**LONG, "train__epochs": 8, "checkpoint__every__steps": 0, "checkpoint__keep": 9}
    run = tmp_path / "run"
    config_of("countries", run, checkpoint__every__epochs=1, **keys).save(tmp_path / "config.yaml")
    process = start([str(tmp_path / "config.yaml")], ranks=ranks)
    while len(checkpoints(run)) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    written = checkpoints(run)
    launched = [process_of_rank(number, process.pid) for number in range(ranks if ranks > 1 else 0)]
    for pid in [process.pid, *(launched if to == "terminal" else [])]:
        os.kill(pid, signal.SIGINT)
    code, errors = ended(process)
    assert code == 130 if ranks == 1 else code != 0, errors
    (line,) = [text for text in errors.splitlines() if text.startswith("kge-torchrec: ")]
    newest = checkpoints(run)[-1]
    assert newest > written[-1]
    said = f"interrupted; checkpoint {newest} is written. Resume with `train --resume {run}`."
    assert line == f"kge-torchrec: {said}"
    run_world(ranks, rank_resumes, run)
    whole = config_of("countries", tmp_path / "whole", **keys)
    run_world(ranks, rank_trains, tmp_path, whole)
    one, again = (run_world(ranks, rank_reads, tmp_path / name)[0] for name in ("whole", "run"))
    assert largest_difference(one, again) == 0
