"""Checkpoints: whole or not at all, in the background or not; which are kept; damaged ones."""

from __future__ import annotations

import logging
import math
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from training_runs import (
    config_of,
    fit,
    in_step,
    largest_difference,
    longer_config,
    rank,
    scripted,
    tiny_store,
)
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.distributed.processes import Rows, processes
from kge_torchrec.errors import StoreError
from kge_torchrec.training import checkpoints as module
from kge_torchrec.training.checkpoint_files import NotFinite, write_rows
from kge_torchrec.training.checkpoints import (
    BEST,
    NEWEST,
    CheckpointError,
    Checkpoints,
    NonFiniteParameters,
)
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.state import TrainState
from kge_torchrec.training.trainer import NonFiniteLoss, Trainer

FOUR = [f"step-{step:012d}" for step in (5, 10, 15, 20)]


@pytest.fixture(autouse=True)
def copies():
    """Small tables are written in the background too; also in ``background_config`` of ranks."""
    with patch.object(module, "SMALL", 0):
        yield


def names(run: Path) -> list[str]:
    """All that lies in the checkpoints folder, hidden files too."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def background_config(store: Path, run: Path, background: bool = True, **keys):
    module.SMALL = 0
    keys = {"checkpoint__options__background": background, "train__optimizer": "adam", **keys}
    return longer_config(store, run, checkpoint__keep=9, **keys)


# Which are kept


@pytest.mark.parametrize(
    "keys, steps",
    [
        ({"checkpoint__keep": 2}, [15, 20]),
        ({"checkpoint__every__epochs": 0}, [20]),
        ({"checkpoint__every__steps": 2, "checkpoint__keep": 5}, [14, 15, 17, 19, 20]),
        ({"checkpoint__keep": 9}, [5, 10, 15, 20]),
    ],
)
def test_last_checkpoints_of_an_interval_are_kept(store, tmp_path, keys, steps):
    """And what a killed write has left goes."""
    leftover = tmp_path / "checkpoints" / ".partial-step-000000000003"
    leftover.mkdir(parents=True)
    (leftover / "rank-00000.safetensors").write_bytes(b"half")
    fit(longer_config(store, tmp_path, **keys))
    assert names(tmp_path) == [f"step-{step:012d}" for step in steps]


def test_best_checkpoint_is_kept(store, tmp_path, caplog):
    config = longer_config(store, tmp_path, checkpoint__keep=1, evaluation__every=1)
    session = fit(config, scripted([0.9, 0.5, 0.6, 0.7]))
    assert names(tmp_path) == [FOUR[0], FOUR[-1]]
    with processes("cpu"):
        assert session.restore_parameters().epoch == 1
        assert session.restore().epoch == 4
        order = session.checkpoints.order
        assert [order(which)[0] for which in (BEST, NEWEST)] == [FOUR[0], FOUR[-1]]
        shutil.rmtree(tmp_path / "checkpoints" / FOUR[0])
        assert order(BEST)[0] == FOUR[-1] and f"{FOUR[0]}, is missing" in caplog.text
        with pytest.raises(CheckpointError, match=f"no checkpoint '{FOUR[0]}'; it has {FOUR[-1]}"):
            order(FOUR[0])


# Damaged and missing ones


def truncate(run: Path, name: str) -> None:
    """Cuts the largest file of a checkpoint in half."""
    file = max((run / "checkpoints" / name).iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_damaged_newest_checkpoint_is_skipped_with_a_warning(store, tmp_path, caplog):
    config = longer_config(store, tmp_path, train__schedule="linear", checkpoint__keep=9)
    uninterrupted = fit(config)
    truncate(tmp_path, FOUR[-1])
    with caplog.at_level(logging.WARNING):
        again = fit(config)
    assert f"{FOUR[-1]}" in caplog.text and "bytes instead of" in caplog.text
    assert largest_difference(uninterrupted.parameters, again.parameters) == 0
    assert names(tmp_path) == FOUR


def test_damaged_checkpoints_do_not_replace_good_ones(store, tmp_path):
    """The one written after falling back is older by name than the damaged one."""
    fit(longer_config(store, tmp_path, checkpoint__keep=2))
    truncate(tmp_path, FOUR[-1])
    shorter = longer_config(store, tmp_path, checkpoint__keep=1, checkpoint__every__steps=3)
    stats = []
    look = lambda kind, values: stats.append(names(tmp_path)) if kind == "checkpoint" else None  # noqa: E731
    fit(shorter, lambda loop: loop.callbacks.append(look))
    assert stats == [["step-000000000018"], [FOUR[-1]]]


def test_unreadable_checkpoints_are_named(store, tmp_path):
    config = longer_config(store, tmp_path)
    fit(config)
    folder = tmp_path / "checkpoints" / FOUR[-1]
    for name in FOUR[-2:]:
        truncate(tmp_path, name)
    with pytest.raises(CheckpointError, match=r"(?s)no readable checkpoint.*000020.*000015"):
        fit(config)
    shutil.rmtree(tmp_path / "checkpoints" / FOUR[2])
    (folder / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"{FOUR[-1]} .*rank-00000.safetensors is missing"):
        fit(config)
    (folder / "manifest.json").write_text('{"format": 99, "files": {}, "crc32": {}}')
    with pytest.raises(CheckpointError, match=r"format 99; the only known is 2"):
        fit(config)


def test_damaged_best_checkpoint_falls_back_to_newest(store, tmp_path, caplog):
    """At the end of a resumed run, and for evaluation, prediction and export."""
    config = longer_config(store, tmp_path, evaluation__every=1, checkpoint__keep=1)
    fit(config, scripted([0.5, 0.9, 0.6, 0.7]))
    assert names(tmp_path) == [FOUR[1], FOUR[3]]
    truncate(tmp_path, FOUR[1])
    config.save(tmp_path / "config.yaml")
    run = api.resume(tmp_path)
    assert run.results["checkpoint"] == {"name": FOUR[3], "epoch": 4}
    assert caplog.text.count(f"{FOUR[1]} in") == 1 and "trying another one" in caplog.text
    assert run.evaluate() == run.results["test"]
    run.export(tmp_path / "export")
    with pytest.raises(CheckpointError, match=rf"{FOUR[1]} .*bytes instead of"):
        run.export(tmp_path / "other", checkpoint=FOUR[1])


def test_run_without_checkpoints_restarts_only_with_force(store, tmp_path):
    run = api.train(config_of(store, tmp_path / "run"))
    run.close()
    expected, newest = run.results["test"], names(run.path)[-1]
    shutil.rmtree(run.path / "checkpoints")
    auto = replace(run.config, run=replace(run.config.run, resume="auto"))
    for again in (lambda: api.resume(run.path), lambda: api.train(auto)):
        with pytest.raises(CheckpointError, match=f"the newest was {newest}. .*--force"):
            again()
    with pytest.raises(CheckpointError, match=f"are missing; the newest was {newest}"):
        run.evaluate()
    assert main(["train", "--resume", str(run.path)]) == 1
    assert main(["train", "--resume", str(run.path), "--force"]) == 0
    assert api.open_run(run.path).results["test"] == expected


def test_changed_store_is_rejected(tmp_path):
    path = tmp_path / "store"
    run = api.train(config_of(tiny_store(path).path, tmp_path / "run", train__epochs=1))
    run.close()
    path.rename(tmp_path / "old")
    tiny_store(path, train=131)
    with pytest.raises(StoreError, match=r"not the ones that .*run was trained on"):
        api.resume(run.path)
    with pytest.raises(StoreError, match=r"not the ones"):
        run.evaluate()


# How they are written


def test_saving_does_not_change_training(store, tmp_path):
    """TorchRec makes optimizer state by a step, which must not count; nor is state lost."""
    options = {"train__optimizer": "adam", "train__optimizer_options__weight_decay": 0.1}
    for engine in ("torchrec", "handrolled"):
        options["entities__engine"] = engine
        folder = tmp_path / engine
        often = fit(longer_config(store, folder / "a", checkpoint__every__steps=1, **options),
                    lambda loop: loop.session.backend.state())  # fmt: skip
        once = fit(longer_config(store, folder / "b", checkpoint__every__epochs=0, **options))
        assert largest_difference(often.parameters, once.parameters) == 0


def rank_trains(store: Path, run: Path, background: bool) -> dict:
    config = background_config(store, run, background, checkpoint__every__steps=3)
    return fit(config).parameters


def test_same_bytes_however_they_are_written(store, tmp_path):
    runs = {False: tmp_path / "waits", True: tmp_path / "copies"}
    results = {way: run_world(2, rank_trains, store, run, way)[0] for way, run in runs.items()}
    files = [file.relative_to(runs[False]) for file in runs[False].rglob("*.safetensors")]
    assert len(files) == len(names(runs[False])) * 2
    assert names(runs[True]) == names(runs[False])
    for file in files:
        assert (runs[True] / file).read_bytes() == (runs[False] / file).read_bytes()
    assert largest_difference(results[True], results[False]) == 0
    lines = [x for x in RunFolder(runs[True]).load_metrics() if x["kind"] == "checkpoint"]
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


@pytest.mark.parametrize(
    "background, small, free, copies, said",
    [
        (True, 4001, 1 << 40, False, ""),
        (True, 4000, 4000, True, "with 0.00 GiB more memory; checkpoint.options.background chang"),
        (True, 4000, 3999, False, "does not fit into 0.00 GiB of free memory"),
        (False, 0, 1 << 40, False, ""),
    ],
)
def test_way_follows_size_and_memory(
    tmp_path, monkeypatch, capsys, background, small, free, copies, said
):
    monkeypatch.setattr(module, "SMALL", small)
    monkeypatch.setattr(module, "available_memory", lambda: free)
    with processes("cpu") as ranks:
        checkpoints = Checkpoints(tmp_path, ranks)
        state = [Rows("x", torch.zeros(1000))]
        for step in (1, 2):  # it is said once
            progress = TrainState(global_step=step)
            figures = checkpoints.save(state, progress, background) or checkpoints.settle()
    assert figures["extra_memory_bytes"] == 4000 * copies
    heard = capsys.readouterr().err
    assert heard.count("\n") == bool(said) and said in heard


# Faults while they are written


def slowly(seconds: float) -> None:
    """From now on threads of this process that write a checkpoint take so long."""
    write = module.write_rows

    def wait_and_write(*args):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        return write(*args)

    module.write_rows = wait_and_write


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(module, "write_rows", module.write_rows)
    return slowly


def at(kind: str, epoch: int, act):
    """A callback that acts at an event of an epoch."""
    return lambda heard, values: act() if heard == kind and values.get("epoch") == epoch else None


def raises_at_step(error):
    """A change of the loop: a callback raises an error in the second epoch."""

    def act() -> None:
        raise error

    return lambda loop: loop.callbacks.append(at("step", 2, act))


def rank_has_no_memory(store: Path, run: Path) -> str:
    def no_memory(*_):
        raise MemoryError("no memory")

    if rank() == 1:
        module._copy = no_memory
    with pytest.raises(CheckpointError) as caught:
        fit(background_config(store, run))
    return str(caught.value)


def test_rank_without_memory_for_a_copy_ends_every_rank(store, tmp_path):
    for message in run_world(2, rank_has_no_memory, store, tmp_path):
        assert f"{FOUR[0]} could not be written" in message and "rank 1: no memory" in message
    assert names(tmp_path) == []


def rank_fills_the_disk(store: Path, run: Path, background: bool) -> tuple[str, int]:
    def limit() -> None:
        if rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))

    config = background_config(store, run, background)
    try:
        with pytest.raises(CheckpointError) as caught:
            fit(config, lambda loop: loop.callbacks.append(at("epoch", 3, limit)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert caught.value.on_every_rank
    with processes("cpu") as ranks:
        return str(caught.value), Session(config, RunFolder(run), ranks).restore().epoch


@pytest.mark.parametrize("background", [False, True])
def test_full_disk_ends_every_rank(store, tmp_path, background):
    for message, epoch in run_world(2, rank_fills_the_disk, store, tmp_path, background):
        assert f"checkpoint {FOUR[2]} could not be written" in message
        assert "rank 1: " in message and "File too large" in message
        assert f"earlier checkpoints are intact: {FOUR[0]}, {FOUR[1]}." in message
        assert epoch == 2
    assert names(tmp_path) == FOUR[:2]


def test_uncreatable_folder_is_reported(store, tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"(?s)could not be written.*intact: none"):
        fit(longer_config(store, tmp_path))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_error_completes_a_checkpoint_and_an_interrupt_gives_it_up(store, tmp_path, slow, error):
    slow(0.5)
    with pytest.raises(error):
        fit(background_config(store, tmp_path), raises_at_step(error))
    done = FOUR[0] if error is ZeroDivisionError else f".partial-{FOUR[0]}"
    assert names(tmp_path) == [done]


def test_checkpoint_is_complete_soon_after_it_is_written(store, tmp_path, slow):
    """Within the epoch, so that a kill does not lose it."""
    complete = []

    def look(kind: str, values: dict) -> None:
        if kind == "step":
            time.sleep(0.3)
        if kind == "checkpoint":
            complete.append((values["name"], names(tmp_path)))

    slow(0.1)
    config = background_config(store, tmp_path, train__epochs=2, train__log_every=2)
    fit(config, lambda loop: loop.callbacks.append(look))
    lines = RunFolder(tmp_path).load_metrics()
    (step, *_) = (line["step"] for line in lines if line["kind"] == "checkpoint")
    assert step == 7 and complete[0][0] == FOUR[0] and FOUR[0] in complete[0][1]


def test_next_save_waits_for_a_slow_writer(store, tmp_path, slow):
    slow(0.7)
    fit(background_config(store, tmp_path))
    lines = RunFolder(tmp_path).load_metrics()
    waited = [line["waited_seconds"] for line in lines if line["kind"] == "checkpoint"]
    assert names(tmp_path) == FOUR and max(waited) > 0.3


# NaN and infinity


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_infinity_and_nan_of_every_format_are_noticed(tmp_path, dtype):
    limits = torch.finfo(dtype)
    values = torch.tensor([limits.max, limits.min, limits.tiny, 0.0, -1.0], dtype=dtype)
    write_rows(tmp_path / "x", [Rows("x", values)])
    for bad in (torch.inf, -torch.inf, torch.nan):
        values[2] = bad
        with pytest.raises(NotFinite, match="x"):
            write_rows(tmp_path / "x", [Rows("x", values)])


def poison(loop: Trainer, of: str) -> None:
    """Leave NaN behind on rank 1, which no loss has seen yet."""
    backend = loop.session.backend
    if rank() == 1 and of == "table":
        backend.shard().rows[-1, -1] = math.nan
    elif rank() == 1 and of == "dense":  # a replica, which rank 0 writes
        loop.session.scorer.relations.data[0, 0] = math.inf
    elif rank() == 1:
        next(iter(backend.table.optimizers[0].states.values()))[0] = math.nan


def rank_is_poisoned(store: Path, run: Path, step: int, of: str, background: bool):
    engine = "handrolled" if of == "state" else "torchrec"
    config = background_config(store, run, background, entities__engine=engine)
    # In the background a loss may be NaN before the thread sees it.
    errors = (NonFiniteParameters, NonFiniteLoss) if background else NonFiniteParameters
    with pytest.raises(errors) as caught:
        fit(config, in_step(step - 1, lambda loop: poison(loop, of)))
    with processes("cpu") as ranks:
        return str(caught.value), Session(config, RunFolder(run), ranks).restore().global_step


@pytest.mark.parametrize(
    "step, of, background",
    [(10, "table", True), (20, "dense", False), (10, "dense", True), (15, "state", False)],
)
def test_nan_ends_every_rank_and_its_checkpoint_is_dropped(store, tmp_path, step, of, background):
    """An epoch has 5 steps; step 20 is the last of the run, so no later loss depends on it."""
    name = {"table": "model.entities", "dense": "scorer.relations", "state": "momentum1"}[of]
    for message, restored in run_world(2, rank_is_poisoned, store, tmp_path, step, of, background):
        assert "loss is nan" in message or (name in message and "(rank 1)" in message)
        assert restored == step - 5
    assert names(tmp_path) == FOUR[: step // 5 - 1]


def rank_breaks(store: Path, run: Path) -> tuple[str, int]:
    """Rank 1's loss is infinite at the 8th step: epoch 2, step 3."""

    act = lambda loop: torch.tensor(math.inf) if rank() == 1 else None  # noqa: E731
    config = longer_config(store, run, checkpoint__every__steps=2)
    with pytest.raises(NonFiniteLoss) as caught:
        fit(config, in_step(7, act))
    with processes("cpu") as ranks:
        return str(caught.value), Session(config, RunFolder(run), ranks).restore().global_step


def test_epoch_step_and_rank_of_an_infinite_loss_are_named(store, tmp_path):
    for message, restored in run_world(2, rank_breaks, store, tmp_path):
        assert "the loss is inf at epoch 2, step 3, rank 1" in message
        assert "A smaller train.lr or model.init_scale" in message
        assert restored == 7  # the last one saved before; it was read before it was saved
