"""Checkpoints: whole or not at all, in the background or not; which are kept; damaged ones.

Nothing in them is ever executed.
"""

from __future__ import annotations

import json
import math
import pickle
import resource
import shutil
import signal
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
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

from kge_torchrec import api, load_model
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
ONE_EPOCH = {"train__epochs": 1, "checkpoint__keep": 1, "train__optimizer": "adam"}


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
    ],
)
def test_last_checkpoints_of_an_interval_are_kept(store, tmp_path, keys, steps):
    """And what a killed write has left goes."""
    leftover = tmp_path / "checkpoints" / ".partial-step-000000000003"
    leftover.mkdir(parents=True)
    (leftover / "rank-00000.safetensors").write_bytes(b"half")
    fit(longer_config(store, tmp_path, **keys))
    assert names(tmp_path) == [f"step-{step:012d}" for step in steps]


def test_best_checkpoint_is_kept_and_falls_back_to_the_newest(store, tmp_path, caplog):
    """At the end of a resumed run, and for evaluation, prediction and export."""
    config = longer_config(store, tmp_path, evaluation__every=1, checkpoint__keep=1)
    session = fit(config, scripted([0.5, 0.9, 0.6, 0.7]))
    assert names(tmp_path) == [FOUR[1], FOUR[3]]
    with processes("cpu"):
        assert session.restore_parameters().epoch == 2
        assert session.restore().epoch == 4
    order = session.checkpoints.order
    assert [order(which)[0] for which in (BEST, NEWEST)] == [FOUR[1], FOUR[3]]
    damage(tmp_path, FOUR[1])
    config.save(tmp_path / "config.yaml")
    run = api.resume(tmp_path)
    assert run.results["checkpoint"] == {"name": FOUR[3], "epoch": 4}
    assert caplog.text.count(f"{FOUR[1]} in") == 1 and "trying another one" in caplog.text
    assert run.evaluate() == run.results["test"]
    run.export(tmp_path / "export")
    with pytest.raises(CheckpointError, match=rf"{FOUR[1]} .*bytes instead of"):
        run.export(tmp_path / "other", checkpoint=FOUR[1])
    shutil.rmtree(tmp_path / "checkpoints" / FOUR[1])
    assert order(BEST)[0] == FOUR[3] and f"{FOUR[1]}, is missing" in caplog.text
    with pytest.raises(CheckpointError, match=f"no checkpoint '{FOUR[1]}'; it has {FOUR[3]}"):
        order(FOUR[1])


# Damaged and missing ones


@pytest.fixture(scope="module")
def trained(store, tmp_path_factory) -> tuple[Path, dict]:
    """A run with the checkpoints FOUR, and its parameters."""
    run = tmp_path_factory.mktemp("run")
    return run, fit(longer_config(store, run, checkpoint__keep=9)).parameters


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(trained[0], tmp_path / "run")


def damage(run: Path, name: str) -> None:
    """Cut the largest file of a checkpoint in half."""
    file = max((run / "checkpoints" / name).iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_damaged_newest_checkpoint_is_skipped_with_a_warning(store, trained, run, caplog):
    """It does not replace good ones, although those after it are older by name."""
    damage(run, FOUR[-1])
    shorter = longer_config(store, run, checkpoint__keep=1, checkpoint__every__steps=3)
    stats = []
    look = lambda kind, values: stats.append(names(run)) if kind == "checkpoint" else None  # noqa: E731
    again = fit(shorter, lambda loop: loop.callbacks.append(look))
    assert f"{FOUR[-1]}" in caplog.text and "bytes instead of" in caplog.text
    assert largest_difference(trained[1], again.parameters) == 0
    assert stats == [["step-000000000018"], [FOUR[-1]]]


def test_unreadable_checkpoints_are_named(store, run):
    for name in FOUR:
        damage(run, name)
    with pytest.raises(CheckpointError, match=r"(?s)no readable checkpoint.*000020.*000015"):
        fit(longer_config(store, run))


def changed(**values):
    """A change of a manifest, with a checksum that fits, as an attacker would write it."""

    def change(manifest: dict) -> dict:
        del manifest["crc32"]
        manifest |= values
        return manifest | {"crc32": zlib.crc32(json.dumps(manifest).encode())}

    return change


def further(manifest: dict) -> dict:
    manifest["progress"]["epoch"] += 1
    return manifest


DAMAGES = [
    ("rank-00000.safetensors", None, r"rank-00000.safetensors is missing"),
    ("rank-00000.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]),
     "rank-00000.safetensors is damaged: the checksum"),
    ("manifest.json", further, "manifest.json is damaged"),
    ("manifest.json", lambda manifest: {"format": 99, "files": {}}, "99; the only known is 2"),
    *(("manifest.json", changed(**values), "manifest.json is not valid") for values in (
        {"files": {"../../config.yaml": 1}},
        {"files": None},
        {"tensors": {"x": [["../../config.yaml", 0, 1, 0]]}},
        {"tensors": {"x": [["rank-00000.safetensors", "0", 1, 0]]}},
        {"tensors": {"x": None}},
        {"progress": {"epoch": 1, "evil": 2}},
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), DAMAGES)
def test_damage_is_named(store, run, name, change, words):
    for other in FOUR[:-1]:
        shutil.rmtree(run / "checkpoints" / other)
    file = run / "checkpoints" / FOUR[-1] / name
    if change is None:
        file.unlink()
    elif name == "manifest.json":
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    else:
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=f"{FOUR[-1]} .*{words}"):
        fit(longer_config(store, run))


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), which=st.integers(0, 2))
def test_flipped_bits_are_detected_or_harmless(store, of_two, tmp_path, where, bit, which):
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(of_two[0], copy)
    file = sorted((copy / "checkpoints" / FOUR[0]).iterdir())[which]
    content = bytearray(file.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    file.write_bytes(content)
    try:
        results = fit(config_of(store, copy, **ONE_EPOCH)).parameters
    except CheckpointError as error:
        assert "step-" in str(error)
    else:
        assert largest_difference(of_two[1], results) == 0


@pytest.fixture(scope="module")
def of_two(store, tmp_path_factory) -> tuple[Path, dict]:
    """A run of two ranks with the checkpoint FOUR[0], and its parameters."""
    run = tmp_path_factory.mktemp("of_two")
    return run, run_world(2, rank_trains_an_epoch, store, run)[0]


def rank_trains_an_epoch(store: Path, run: Path) -> dict:
    return fit(config_of(store, run, **ONE_EPOCH)).parameters


def test_any_program_reads_the_tensors(of_two):
    """By safetensors alone; the names say which rows they are."""
    folder, table = of_two[0] / "checkpoints" / FOUR[0], "model.entities.embeddings.entity.weight"
    parts = [load_file(folder / f"rank-0000{rank}.safetensors") for rank in (0, 1)]
    assert {name: len(part[name]) for part in parts for name in part if table in name} == {
        f"{table}@0": 19, f"{table}@19": 18}  # fmt: skip


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


def nothing_unpickles(monkeypatch) -> None:
    """Every way into pickle raises; torch's collectives keep theirs, which hold no file's bytes."""

    class Refused(pickle.Unpickler):
        def load(self):
            raise AssertionError("something was unpickled")

    def refuse(*_: object, **__: object):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", Refused)
    monkeypatch.setattr(torch, "load", refuse)


def uses_everything(store: Path, run: Path) -> None:
    """Trains, resumes, evaluates, predicts, exports and loads the export."""
    api.train(config_of(store, run, **ONE_EPOCH)).close()
    with api.resume(run, {"train.epochs": 2}) as opened:
        opened.evaluate()
        opened.predict(head="e1", relation="r0")
        opened.export(run / "export")
    load_model(run / "export").predict(head="e1", relation="r0")


def rank_unpickles_nothing(store: Path, folder: Path) -> int:
    uses_everything(store, folder / "first")  # numba keeps compiled code as pickles
    with pytest.MonkeyPatch.context() as patch:
        nothing_unpickles(patch)
        patch.setattr("kge_torchrec.distributed.processes._sendable", lambda error: error)
        uses_everything(store, folder / "again")
    return rank()


def test_nothing_of_a_file_is_unpickled(store, tmp_path):
    assert run_world(2, rank_unpickles_nothing, store, tmp_path) == [0, 1]


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
    copied = [line["extra_memory_bytes"] > 0 for line in lines]
    assert all(copied[:-1]) and not copied[-1]  # training waits for the last one


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
        (True, 4000, 4000, True, ""),
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


@pytest.fixture
def slow_threads(monkeypatch):
    """Threads of this process that write a checkpoint take a while."""
    write = module.write_rows

    def wait_and_write(*args):
        time.sleep(0.1 * (threading.current_thread() is not threading.main_thread()))
        return write(*args)

    monkeypatch.setattr(module, "write_rows", wait_and_write)


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
@pytest.mark.usefixtures("slow_threads")
def test_error_completes_a_checkpoint_and_an_interrupt_gives_it_up(store, tmp_path, error):
    with pytest.raises(error):
        fit(background_config(store, tmp_path), raises_at_step(error))
    done = FOUR[0] if error is ZeroDivisionError else f".partial-{FOUR[0]}"
    assert names(tmp_path) == [done]


@pytest.mark.usefixtures("slow_threads")
def test_checkpoint_is_complete_soon_after_it_is_written(store, tmp_path):
    """Within the epoch, so that a kill does not lose it."""
    complete = []

    def look(kind: str, values: dict) -> None:
        if kind == "step":
            time.sleep(0.3)
        if kind == "checkpoint":
            complete.append((values["name"], names(tmp_path)))

    config = background_config(store, tmp_path, train__epochs=2, train__log_every=2)
    fit(config, lambda loop: loop.callbacks.append(look))
    lines = RunFolder(tmp_path).load_metrics()
    (step, *_) = (line["step"] for line in lines if line["kind"] == "checkpoint")
    assert step == 7 and complete[0][0] == FOUR[0] and FOUR[0] in complete[0][1]


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
    [(10, "table", True), (20, "dense", False), (15, "state", False)],
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
