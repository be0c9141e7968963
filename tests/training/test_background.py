"""Checkpoints that a thread writes while training continues."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from training_runs import dies_after, fit, largest_difference, longer_config, rank
from worlds import run_world

from kge_torchrec.distributed.processes import Rows, processes
from kge_torchrec.training import checkpoints as module
from kge_torchrec.training.checkpoint_files import NotFinite, write_rows
from kge_torchrec.training.checkpoints import CheckpointError, Checkpoints, NonFiniteParameters
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.state import TrainState
from kge_torchrec.training.trainer import Trainer

FOUR = [f"step-{step:012d}" for step in (5, 10, 15, 20)]


def copies_small_tables():
    """Inside the block, small tables are written in the background too."""
    return patch.object(module, "SMALL", 0)


@pytest.fixture(autouse=True)
def copies():
    with copies_small_tables():
        yield


def names(run: Path) -> list[str]:
    """All that lies in the checkpoints folder, hidden files too."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def config_of(store: Path, run: Path, background: bool = True, **keys):
    keys = {"checkpoint__options__background": background, "train__optimizer": "adam", **keys}
    return longer_config(store, run, checkpoint__keep=9, **keys)


def rank_trains(store: Path, run: Path, background: bool) -> dict:
    with copies_small_tables():
        return fit(config_of(store, run, background, checkpoint__every__steps=3)).parameters


def test_same_bytes_however_they_are_written(store, tmp_path):
    runs = {False: tmp_path / "waits", True: tmp_path / "copies"}
    results = {way: run_world(2, rank_trains, store, run, way)[0] for way, run in runs.items()}
    contents = {
        way: {
            str(file.relative_to(run)): file.read_bytes()
            for file in sorted((run / "checkpoints").rglob("*"))
            if file.suffix == ".safetensors"
        }
        for way, run in runs.items()
    }
    assert len(contents[False]) == len(names(runs[False])) * 2
    assert names(runs[True]) == names(runs[False])
    assert contents[True] == contents[False]
    assert largest_difference(results[True], results[False]) == 0
    lines = (runs[True] / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, lines) if line["kind"] == "checkpoint"]
    assert [line["name"] for line in lines] == names(runs[False])
    for line in lines[:-1]:  # training waits for the last one
        assert line["extra_memory_bytes"] > 0
        assert min(line["pause_ms"], line["seconds"]) >= 0
    assert lines[-1]["extra_memory_bytes"] == 0


@pytest.mark.parametrize("background", [False, True])
def test_checkpoint_has_the_values_of_its_step(tmp_path, background):
    """Also of a tensor with two names, and of several runs of rows of one tensor."""
    values = torch.randn(1_000_000)
    state = [Rows("one", values[:10], 7), Rows("one", values[10:20], 30), Rows("other", values),
             Rows("half", values.half()), Rows("number", torch.tensor(3))]  # fmt: skip
    expected = [rows.local.clone() for rows in state]
    loaded = [rows._replace(local=torch.zeros_like(rows.local)) for rows in state]
    with processes("cpu") as ranks:
        checkpoints = Checkpoints(tmp_path / "checkpoints", ranks)
        checkpoints.save(state, TrainState(global_step=3), background=background)
        values.zero_()
        checkpoints.settle()
        checkpoints.load(checkpoints.names(), lambda checkpoint: loaded)
    for rows, value in zip(loaded, expected, strict=True):
        assert torch.equal(rows.local, value), rows.name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_infinity_and_nan_of_every_format_are_noticed(tmp_path, dtype):
    limits = torch.finfo(dtype)
    values = torch.tensor([limits.max, limits.min, limits.tiny, 0.0, -1.0], dtype=dtype)
    write_rows(tmp_path / "x", [Rows("x", values)])
    for bad in (torch.inf, -torch.inf, torch.nan):
        values[2] = bad
        with pytest.raises(NotFinite, match="x"):
            write_rows(tmp_path / "x", [Rows("x", values)])


# Which way


@pytest.mark.parametrize(
    "background, small, free, copies, said",
    [
        (True, 4001, 1 << 40, False, ""),
        (True, 4000, 4000, True, "a thread writes .* with 0.00 GiB more memory"),
        (True, 4000, 3999, False, "does not fit into 0.00 GiB of free memory"),
        (False, 0, 1 << 40, False, ""),
    ],
)
def test_way_follows_size_and_memory(tmp_path, monkeypatch, background, small, free, copies, said):
    monkeypatch.setattr(module, "SMALL", small)
    monkeypatch.setattr(module, "available_memory", lambda: free)
    heard = []
    with processes("cpu") as ranks:
        checkpoints = Checkpoints(tmp_path, ranks)
        checkpoints.say = heard.append
        state = [Rows("x", torch.zeros(1000))]
        figures = checkpoints.save(state, TrainState(), background) or checkpoints.settle()
    assert figures["extra_memory_bytes"] == 4000 * copies
    assert len(heard) == bool(said) and re.search(said, "".join(heard))


def rank_has_no_memory(store: Path, run: Path) -> str:
    def no_memory(*_):
        raise MemoryError("no memory")

    if rank() == 1:
        module._copy = no_memory
    with pytest.raises(CheckpointError) as caught, copies_small_tables():
        fit(config_of(store, run))
    return str(caught.value)


def test_rank_without_memory_for_a_copy_ends_every_rank(store, tmp_path):
    for message in run_world(2, rank_has_no_memory, store, tmp_path):
        assert f"{FOUR[0]} could not be written" in message and "rank 1: no memory" in message
    assert names(tmp_path) == []


def test_choice_is_said_once(store, tmp_path):
    said = []

    def listen(loop: Trainer) -> None:
        loop.session.checkpoints.say = said.append

    fit(config_of(store, tmp_path), listen)
    assert len(said) == 1 and "checkpoint.options.background changes it" in said[0]


# Faults


def slowly(seconds: float) -> None:
    """From now on threads of this process that write a checkpoint take so long."""
    write = module.write_rows

    def wait_and_write(path, state, threads, ends):
        until = time.monotonic() + seconds
        while threading.current_thread() is not threading.main_thread() and not ends():
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return write(path, state, threads, ends)

    module.write_rows = wait_and_write


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(module, "write_rows", module.write_rows)
    return slowly


def at(kind: str, epoch: int, act):
    """A callback that acts at an event of an epoch."""
    return lambda heard, values: act() if heard == kind and values.get("epoch") == epoch else None


def rank_fills_the_disk(store: Path, run: Path) -> str:
    def limit() -> None:
        if rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))

    try:
        with pytest.raises(CheckpointError) as caught, copies_small_tables():
            fit(config_of(store, run), lambda loop: loop.callbacks.append(at("epoch", 3, limit)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return str(caught.value)


def test_full_disk_ends_every_rank(store, tmp_path):
    for message in run_world(2, rank_fills_the_disk, store, tmp_path):
        assert f"checkpoint {FOUR[2]} could not be written" in message
        assert "rank 1: " in message and "File too large" in message
        assert f"earlier checkpoints are intact: {FOUR[0]}, {FOUR[1]}." in message
    assert names(tmp_path) == FOUR[:2]


def rank_is_poisoned(store: Path, run: Path, background: bool, of: str) -> str:
    with processes("cpu") as ranks:
        session = Session(config_of(store, run), RunFolder(run), ranks)
        progress = session.restore()
        session.checkpoints.save(session.state(progress), progress)
        if rank() == (1 if of == "table" else 0):  # rank 1 writes the dense parameters
            table, dense = session.backend.shard().rows, session.scorer.relations.data
            (table if of == "table" else dense)[-1, -1] = torch.nan
        progress.global_step = 5
        with pytest.raises(NonFiniteParameters) as caught, copies_small_tables():
            session.checkpoints.save(session.state(progress), progress, background=background)
            session.checkpoints.settle()
        assert session.checkpoints.settle() is None
    return str(caught.value)


@pytest.mark.parametrize(("background", "of"), [(True, "table"), (True, "dense"), (False, "dense")])
def test_nan_ends_every_rank_and_its_checkpoint_is_dropped(store, tmp_path, background, of):
    name, who = {"table": ("model.entities", 1), "dense": ("scorer.relations", 0)}[of]
    for message in run_world(2, rank_is_poisoned, store, tmp_path, background, of):
        assert name in message and f"(rank {who}); training stops" in message
        assert not message.startswith("engine.")
    assert names(tmp_path) == ["step-000000000000"]


def test_error_of_training_lets_the_checkpoint_complete(store, tmp_path, slow):
    def fail() -> None:
        raise ZeroDivisionError

    slow(0.5)
    with pytest.raises(ZeroDivisionError):
        fit(
            config_of(store, tmp_path),
            lambda loop: loop.callbacks.append(at("step", 2, fail)),
        )
    assert names(tmp_path) == FOUR[:1]


def test_interrupt_gives_the_checkpoint_up(store, tmp_path, slow):
    def interrupt() -> None:
        raise KeyboardInterrupt

    slow(30)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fit(config_of(store, tmp_path),
            lambda loop: loop.callbacks.append(at("step", 2, interrupt)))  # fmt: skip
    assert time.monotonic() - start < 20
    assert names(tmp_path) == [f".partial-{FOUR[0]}"]


def test_checkpoint_is_complete_soon_after_it_is_written(store, tmp_path, slow):
    """Within the epoch, so that a kill does not lose it."""
    complete = []

    def look(kind: str, values: dict) -> None:
        if kind == "step":
            time.sleep(0.3)
        if kind == "checkpoint":
            complete.append((values["name"], names(tmp_path)))

    slow(0.1)
    config = config_of(store, tmp_path, train__epochs=2, train__log_every=2)
    fit(config, lambda loop: loop.callbacks.append(look))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (step, *_) = (line["step"] for line in lines if line["kind"] == "checkpoint")
    assert step == 7 and complete[0][0] == FOUR[0] and FOUR[0] in complete[0][1]


def test_next_save_waits_for_a_slow_writer(store, tmp_path, slow, capsys):
    slow(0.7)
    fit(config_of(store, tmp_path))
    said = capsys.readouterr().err
    assert f"s for checkpoint {FOUR[0]}, which was still being written" in said
    assert names(tmp_path) == FOUR


def rank_dies_while_its_writer_works(store: Path, run: Path) -> None:
    """Its writer would take a minute."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    slowly(60)
    with RunFolder(run).locked(), copies_small_tables():
        fit(config_of(store, run), lambda loop: loop.callbacks.append(at("step", 2, die)))


def test_writer_dies_with_its_rank_and_holds_no_lock(store, tmp_path):
    begun = time.monotonic()
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_world(1, rank_dies_while_its_writer_works, store, tmp_path)
    with RunFolder(tmp_path).locked():
        assert time.monotonic() - begun < 50  # the writer would take longer
    assert names(tmp_path) == [f".partial-{FOUR[0]}"]


def rank_trains_until(store: Path, run: Path, step: int | None) -> dict:
    slowly(0.1)
    with copies_small_tables():
        return fit(config_of(store, run, checkpoint__every__steps=2), dies_after(step)).parameters


def test_run_killed_during_a_save_resumes_to_the_same_result(store, tmp_path):
    expected = run_world(2, rank_trains_until, store, tmp_path / "whole", None)[0]
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_world(2, rank_trains_until, store, tmp_path / "run", 12)
    with processes("cpu") as ranks:
        session = Session(config_of(store, tmp_path / "run"), RunFolder(tmp_path / "run"), ranks)
        assert session.restore().global_step in (11, 10, 9)
    again = run_world(2, rank_trains_until, store, tmp_path / "run", None)[0]
    assert largest_difference(expected, again) == 0
    assert not [name for name in names(tmp_path / "run") if name.startswith(".")]
