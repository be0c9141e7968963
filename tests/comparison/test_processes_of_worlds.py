"""Worlds of ranks: what they return, and how one that fails ends them all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparison_ranks import (
    describe,
    die_on_last_rank,
    raise_on_rank_one,
    start_and_wait,
)

from kge_torchrec.comparison import RankFailed, run_world


@pytest.fixture(autouse=True)
def nobody_left():
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_join_one_group_as_under_torchrun(world_size):
    flushes = torch.set_flush_denormal(False)  # whether this processor can; not in this process
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    results = run_world(world_size, "cpu", describe, "word")
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for rank, values in enumerate(results):
        assert values["word"] == "word"
        assert values["total"] == world_size * (world_size + 1) / 2
        assert values["variables"] == [str(rank), str(world_size)] * 2
        assert values["flushed"] == flushes


def test_first_rank_that_raised_is_named():
    with pytest.raises(RankFailed, match=r"^rank 1 raised ValueError: no such thing$") as caught:
        run_world(3, "cpu", raise_on_rank_one)
    assert caught.value.rank == 1
    assert "raise_on_rank_one" in caught.value.details


@pytest.mark.parametrize(
    ("how", "words"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (0, "ended with exit code 3")],
)
def test_dead_rank_ends_all_ranks(how, words):
    started = time.monotonic()
    with pytest.raises(RankFailed, match=rf"^rank 1 {words}"):
        run_world(2, "cpu", die_on_last_rank, int(how))
    assert time.monotonic() - started < 20  # rank 0 waits a minute otherwise


def test_death_of_the_only_rank_is_reported():
    with pytest.raises(RankFailed, match=r"^rank 0 was killed by SIGKILL"):
        run_world(1, "cpu", die_on_last_rank, int(signal.SIGKILL))


@pytest.mark.slow
def test_ranks_end_with_their_killed_launcher(tmp_path):
    """The same happens when the command itself runs out of memory: no process ends its ranks."""
    starter = multiprocessing.get_context("spawn").Process(
        target=start_and_wait, args=(str(tmp_path),)
    )
    starter.start()
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    assert soon(lambda: all(file.exists() and file.read_text() for file in files), 60)
    ranks = [int(file.read_text()) for file in files]
    assert all(map(runs, ranks))
    starter.kill()
    starter.join()
    assert soon(lambda: not any(map(runs, ranks)), 10)


def soon(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    return condition()


def runs(process: int) -> bool:
    """Whether it is there and no mere entry of a process that nobody has waited for."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())
