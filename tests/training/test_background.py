"""Checkpoints that are written while training continues, by a forked process or a thread."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
import zlib
from pathlib import Path

import pytest
import torch
from training_runs import dies_after, fit, largest_difference, longer_config, rank, tiny_store
from worlds import run_world

from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training import checkpoint_saving, checkpoint_writing
from kge_torchrec.training.checkpoint_index import NonFiniteParameters, bytes_of
from kge_torchrec.training.checkpoint_saving import COPY, FORK, NONE, way_of
from kge_torchrec.training.checkpoint_storage import Piece, SavingPlan, plan_saving
from kge_torchrec.training.checkpoint_writing import (
    blocks,
    fork_safe_blocks,
    join_huge_pages,
    write_blocks,
)
from kge_torchrec.training.checkpoints import CheckpointError, Checkpoints
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.state import TrainState
from kge_torchrec.training.trainer import Trainer

FOUR = [f"step-{step:012d}" for step in (5, 10, 15, 20)]
WAYS = [FORK, COPY]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tiny_store(tmp_path_factory.mktemp("graph") / "store").path


def names(run: Path) -> list[str]:
    """All that lies in the checkpoints folder, hidden files too."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def config_of(store: Path, run: Path, way: str, **keys):
    keys = {"checkpoint__options__background": way, "train__optimizer": "adam", **keys}
    return longer_config(store, run, checkpoint__keep=9, **keys)


def rank_trains(store: Path, run: Path, way: str, engine: str) -> dict:
    keys = {"checkpoint__every__steps": 3, "entities__engine": engine}
    return fit(config_of(store, run, way, **keys)).parameters


@pytest.mark.parametrize(
    "world, engine",
    [
        pytest.param(1, "torchrec", marks=pytest.mark.slow),
        (2, "torchrec"),
        pytest.param(2, "handrolled", marks=pytest.mark.slow),
    ],
)
def test_same_bytes_however_they_are_written(store, tmp_path, world, engine):
    results = {
        way: run_world(world, rank_trains, store, tmp_path / way, way, engine)[0]
        for way in (NONE, *WAYS)
    }
    contents = {
        way: {
            str(file.relative_to(tmp_path / way)): file.read_bytes()
            for file in sorted((tmp_path / way / "checkpoints").rglob("*"))
            if file.name == "index.json" or file.suffix == ".bin"
        }
        for way in results
    }
    assert len(contents[NONE]) == len(names(tmp_path / NONE)) * (world + 1)
    for way in WAYS:
        assert names(tmp_path / way) == names(tmp_path / NONE)
        assert contents[way] == contents[NONE]
        assert largest_difference(results[way], results[NONE]) == 0
        lines = (tmp_path / way / "metrics.jsonl").read_text().splitlines()
        lines = [line for line in map(json.loads, lines) if line["kind"] == "checkpoint"]
        assert [line["name"] for line in lines] == names(tmp_path / NONE)[:-1]
        for line in lines:
            assert line["way"] == way and line["extra_memory_bytes"] > 0
            assert min(line["pause_ms"], line["seconds"]) >= 0


@pytest.mark.parametrize("way", [NONE, *WAYS])
def test_checkpoint_has_the_values_of_its_step(tmp_path, way):
    """Also of a tensor with two names, whose memory is not freed after the first one."""
    values = torch.randn(1_000_000)
    state = {"one": {"values": values}, "other": {"values": values}, "half": {"x": values.half()}}
    expected, half = values.clone(), values.half()
    loaded = {
        "one": {"values": torch.zeros_like(values)},
        "other": {"values": torch.zeros_like(values)},
        "half": {"x": torch.zeros_like(half)},
    }
    with processes("cpu") as ranks:
        checkpoints = Checkpoints(tmp_path / "checkpoints", ranks)
        name = checkpoints.save(state, TrainState(global_step=3), background=way)
        values.zero_()
        checkpoints.settle()
        checkpoints.load(loaded, name)
    assert torch.equal(loaded["one"]["values"], expected)
    assert torch.equal(loaded["other"]["values"], expected)
    assert torch.equal(loaded["half"]["x"], half)


def test_shared_memory_is_copied_before_the_fork():
    private, shared = torch.randn(50_000), torch.randn(50_000).share_memory_()
    pieces = [Piece("private", 0, private), Piece("shared", 200_000, shared)]
    held = {block.name: block.numbers for block in fork_safe_blocks(pieces)}
    before = {name: bytes(numbers) for name, numbers in held.items()}
    private.zero_()
    shared.zero_()
    assert bytes(held["private"]) != before["private"]  # the memory itself
    assert bytes(held["shared"]) == before["shared"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_infinity_and_nan_of_every_format_are_noticed(tmp_path, dtype):
    limits = torch.finfo(dtype)
    values = torch.tensor([limits.max, limits.min, limits.tiny, 0.0, -1.0], dtype=dtype)
    (block,) = blocks([Piece("x", 0, values)])
    assert write_blocks(tmp_path / "x", [block]) == [zlib.crc32(bytes_of(values))]
    for bad in (torch.inf, -torch.inf, torch.nan):
        values[2] = bad
        with pytest.raises(Exception, match="x"):
            write_blocks(tmp_path / "x", [block])


def test_huge_pages_are_joined_as_long_as_it_is_quick(monkeypatch):
    """Each place loses what does not fill a page; the kernel refuses the third one."""
    joined, huge = [], 2 << 20

    def madvise(low, size, advice) -> int:
        joined.append((low.value, size.value))
        time.sleep(0.3 if low.value == slow else 0)
        return -1 if low.value == 9 * huge else 0

    monkeypatch.setattr(checkpoint_writing, "_system_calls", lambda: (None, madvise))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "always [madvise] never")
    places = [(huge - 1, huge), (huge + 1, 3 * huge), (6 * huge, huge), (9 * huge, huge)]
    slow = 0
    join_huge_pages([*places, (20 * huge, huge)])
    assert joined == [(2 * huge, 2 * huge), (6 * huge, huge), (9 * huge, huge)]
    joined.clear()
    slow = 2 * huge
    join_huge_pages(places)
    assert joined == [(2 * huge, 2 * huge)]
    joined.clear()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "always madvise [never]")
    join_huge_pages(places)
    assert joined == []


# Which way


@pytest.fixture
def plan() -> SavingPlan:
    return plan_saving({"x": torch.zeros(1000)}, single_rank=True)


@pytest.mark.parametrize(
    "option, small, free, forks, expected, said",
    [
        ("auto", 4001, 1 << 40, True, NONE, ""),
        ("auto", 4000, 1 << 40, True, FORK, "a forked process writes .* at most 0.00 GiB more"),
        ("fork", 4001, 4000, True, FORK, "checkpoint.options.background changes it"),
        ("fork", 4001, 3999, True, NONE, "does not fit into 0.00 GiB of free memory"),
        ("copy", 4001, 4000, True, COPY, "a thread writes"),
        ("auto", 4000, 1 << 40, False, COPY, "a thread writes"),
        ("none", 0, 1 << 40, True, NONE, ""),
    ],
)
def test_way_follows_size_memory_and_device(
    plan, monkeypatch, option, small, free, forks, expected, said
):
    monkeypatch.setattr(checkpoint_saving, "SMALL", small)
    monkeypatch.setattr(checkpoint_saving, "available_memory", lambda: free)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: not forks)
    with processes("cpu") as ranks:
        way, why = way_of(option, plan, ranks)
    assert way == expected
    assert bool(why) == bool(said) and re.search(said, why)


def rank_has_no_memory(store: Path, run: Path) -> str:
    def no_memory(*_):
        raise MemoryError("no memory")

    if rank() == 1:
        checkpoint_saving.copied_blocks = no_memory
    with pytest.raises(CheckpointError) as caught:
        fit(config_of(store, run, COPY))
    return str(caught.value)


def test_rank_without_memory_for_a_copy_ends_every_rank(store, tmp_path):
    for message in run_world(2, rank_has_no_memory, store, tmp_path):
        assert f"{FOUR[0]} could not be written" in message and "rank 1: no memory" in message
    assert names(tmp_path) == []


def test_fork_is_rejected_on_a_gpu(store, tmp_path):
    config = config_of(store, tmp_path, FORK)
    config.check_device(on_cuda=False)
    with pytest.raises(ConfigError, match="a process that uses a GPU cannot be forked; use copy"):
        config.check_device(on_cuda=True)


def test_choice_is_said_once(store, tmp_path):
    said = []

    def listen(loop: Trainer) -> None:
        loop.session.checkpoints.say = said.append

    fit(config_of(store, tmp_path, FORK), listen)
    assert len(said) == 1 and "checkpoint.options.background changes it" in said[0]


def test_without_a_fork_a_thread_writes(store, tmp_path, monkeypatch, caplog):
    def no_memory(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(checkpoint_saving, "forked", no_memory)
    fit(config_of(store, tmp_path, FORK))
    assert names(tmp_path) == FOUR
    assert "no process can be forked: [Errno 12] Cannot allocate memory" in caplog.text


# Faults


def slowly(seconds: float) -> None:
    """From now on forked processes of this process take so long."""
    write = checkpoint_writing.child_answer

    def wait_and_write(path, held):
        time.sleep(seconds)
        return write(path, held)

    checkpoint_saving.child_answer = wait_and_write


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(checkpoint_saving, "child_answer", checkpoint_saving.child_answer)
    return slowly


def child_of(loop: Trainer) -> int:
    return loop.session.checkpoints._saving[-1]._child


def at(kind: str, epoch: int, act):
    """A callback that acts at an event of an epoch."""
    return lambda heard, values: act() if heard == kind and values.get("epoch") == epoch else None


def rank_loses_its_writer(store: Path, run: Path) -> tuple[str, bool]:
    """The process that writes the second checkpoint is killed on the last rank."""

    def kill(loop: Trainer) -> None:
        def kill_the_second(kind: str, values: dict) -> None:
            if kind == "step" and values["epoch"] == 3 and rank() == 1:
                os.kill(child_of(loop), signal.SIGKILL)

        loop.callbacks.append(kill_the_second)

    slowly(1.0)
    with pytest.raises(CheckpointError) as caught:
        fit(config_of(store, run, FORK), kill)
    return str(caught.value), caught.value.on_every_rank


def test_killed_writer_ends_every_rank_and_keeps_earlier_checkpoints(store, tmp_path):
    for message, on_every_rank in run_world(2, rank_loses_its_writer, store, tmp_path):
        assert FOUR[1] in message and "rank 1: the process that wrote it was killed by" in message
        assert f"earlier checkpoints are intact: {FOUR[0]}." in message and on_every_rank
    assert names(tmp_path) == FOUR[:1]


def rank_hears_of_its_writer(store: Path, run: Path) -> int:
    """Return the epoch in which training ends if a writer was killed in the one before a save."""
    loops: list[Trainer] = []

    def kill(loop: Trainer) -> None:
        def kill_once() -> None:
            if (child := child_of(loop)) is not None:
                os.kill(child, signal.SIGKILL)
            loop.session.checkpoints._saving[-1]._written.wait(10)

        loops.append(loop)
        loop.callbacks.append(at("step", 3, kill_once))

    slowly(60)
    with pytest.raises(CheckpointError):
        fit(config_of(store, run, FORK, checkpoint__every__epochs=2), kill)
    return loops[0].progress.epoch


def test_killed_writer_is_heard_of_at_the_end_of_the_epoch(store, tmp_path):
    assert run_world(1, rank_hears_of_its_writer, store, tmp_path) == [3]


def rank_fills_the_disk(store: Path, run: Path, way: str) -> str:
    def limit() -> None:
        if rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))

    try:
        with pytest.raises(CheckpointError) as caught:
            fit(
                config_of(store, run, way),
                lambda loop: loop.callbacks.append(at("epoch", 3, limit)),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.first_tier("fork")
def test_full_disk_ends_every_rank(store, tmp_path, way):
    for message in run_world(2, rank_fills_the_disk, store, tmp_path, way):
        assert f"checkpoint {FOUR[2]} could not be written" in message
        assert "rank 1: " in message and "File too large" in message
        assert f"earlier checkpoints are intact: {FOUR[0]}, {FOUR[1]}." in message
    assert names(tmp_path) == FOUR[:2]


def rank_is_poisoned(store: Path, run: Path, way: str, of: str) -> str:
    with processes("cpu") as ranks:
        session = Session(config_of(store, run, way), RunFolder(run), ranks)
        progress = session.restore()
        session.checkpoints.save(session.state(progress), progress)
        if rank() == (1 if of == "table" else 0):  # rank 1 writes the dense parameters
            table, dense = session.backend.shard().rows, session.scorer.relations.data
            (table if of == "table" else dense)[-1, -1] = torch.nan
        progress.global_step = 5
        with pytest.raises(NonFiniteParameters) as caught:
            session.checkpoints.save(session.state(progress), progress, background=way)
            session.checkpoints.settle()
        assert session.checkpoints.settle() is None
    return str(caught.value)


@pytest.mark.parametrize("way", [NONE, *WAYS])
@pytest.mark.parametrize("of", ["table", "dense"])
@pytest.mark.first_tier("table-fork", "dense-copy", "dense-none")
def test_nan_ends_every_rank_and_its_checkpoint_is_dropped(store, tmp_path, way, of):
    name, who = {"table": ("model.entities", 1), "dense": ("scorer.relations", 0)}[of]
    for message in run_world(2, rank_is_poisoned, store, tmp_path, way, of):
        assert name in message and f"(rank {who}); training stops" in message
        assert not message.startswith("engine.")
    assert names(tmp_path) == ["step-000000000000"]


def test_error_of_training_lets_the_checkpoint_complete(store, tmp_path, slow):
    def fail() -> None:
        raise ZeroDivisionError

    slow(0.5)
    with pytest.raises(ZeroDivisionError):
        fit(
            config_of(store, tmp_path, FORK),
            lambda loop: loop.callbacks.append(at("step", 2, fail)),
        )
    assert names(tmp_path) == FOUR[:1]


def test_interrupt_gives_the_checkpoint_up(store, tmp_path, slow):
    def interrupt() -> None:
        raise KeyboardInterrupt

    slow(30)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fit(config_of(store, tmp_path, FORK),
            lambda loop: loop.callbacks.append(at("step", 2, interrupt)))  # fmt: skip
    assert time.monotonic() - start < 20
    assert names(tmp_path) == [f".partial-{FOUR[0]}"]


def test_next_save_waits_for_a_slow_writer(store, tmp_path, slow):
    said = []
    slow(0.7)
    fit(config_of(store, tmp_path, FORK), lambda loop: setattr(loop, "_say", said.append))
    assert any(f"s for checkpoint {FOUR[0]}, which was still being written" in x for x in said)
    assert names(tmp_path) == FOUR


def test_signals_of_a_terminal_do_not_reach_the_writer(store, tmp_path, slow):
    sent = []

    def send_to_the_writer(loop: Trainer) -> None:
        def send() -> None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(child_of(loop), number)
                sent.append(number)

        loop.callbacks.append(at("step", 2, send))

    slow(0.2)
    fit(config_of(store, tmp_path, FORK), send_to_the_writer)
    assert len(sent) == 3 and names(tmp_path) == FOUR


def rank_dies_while_its_writer_works(store: Path, run: Path) -> None:
    """Its writer would take a minute, and leaves its number."""

    def die(loop: Trainer) -> None:
        def write_and_die() -> None:
            (run / "child").write_text(str(child_of(loop)))
            os.kill(os.getpid(), signal.SIGKILL)

        loop.callbacks.append(at("step", 2, write_and_die))

    slowly(60)
    with RunFolder(run).locked():
        fit(config_of(store, run, FORK), die)


def test_writer_dies_with_its_rank_and_holds_no_lock(store, tmp_path):
    begun = time.monotonic()
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_world(1, rank_dies_while_its_writer_works, store, tmp_path)
    with RunFolder(tmp_path).locked():
        assert time.monotonic() - begun < 50  # the writer would take longer
    child, deadline = Path("/proc") / (tmp_path / "child").read_text(), time.monotonic() + 10
    while child.exists() and time.monotonic() < deadline:
        if ") Z" in (child / "stat").read_text():
            break
        time.sleep(0.05)
    else:
        assert not child.exists()
    assert names(tmp_path) == [f".partial-{FOUR[0]}"]


def rank_trains_until(store: Path, run: Path, step: int | None) -> dict:
    slowly(0.1)
    return fit(config_of(store, run, FORK, checkpoint__every__steps=2), dies_after(step)).parameters


@pytest.mark.parametrize("world, step", [(1, 8), (2, 12)])
@pytest.mark.slow
def test_run_killed_during_a_save_resumes_to_the_same_result(store, tmp_path, world, step):
    expected = run_world(world, rank_trains_until, store, tmp_path / "whole", None)[0]
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_world(world, rank_trains_until, store, tmp_path / "run", step)
    with processes("cpu") as ranks:
        session = Session(
            config_of(store, tmp_path / "run", FORK), RunFolder(tmp_path / "run"), ranks
        )
        assert session.restore().global_step in (step - 1, step - 2, step - 3)
    again = run_world(world, rank_trains_until, store, tmp_path / "run", None)[0]
    assert largest_difference(expected, again) == 0
    assert not [name for name in names(tmp_path / "run") if name.startswith(".")]
