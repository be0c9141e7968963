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
from comparison_ranks import describe, fail, start_and_wait

from kge_torchrec.distributed.worlds import RankFailed, run_world


def test_ranks_join_one_group_as_under_torchrun():
    size = 3
    flushes = torch.set_flush_denormal(False)  # whether this processor can; not in this process
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    results = run_world(size, "cpu", describe, "word")
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for rank, result in enumerate(results):
        assert result == ("word", size * (size + 1) / 2, [str(rank), str(size)] * 2, flushes)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "size, rank, how, words",
    [
        (3, 1, "raises", "raised ValueError: no such thing"),
        (2, 1, "leaves late", "ended with exit code 3"),
        (2, 1, "is killed", r"was killed by SIGKILL \(the kernel does this when memory runs out\)"),
    ],
)
def test_first_rank_that_fails_is_named_and_ends_all(size, rank, how, words):
    """The others lose the connection and raise as well, or would wait a minute."""
    started = time.monotonic()
    with pytest.raises(RankFailed, match=rf"^rank {rank} {words}") as caught:
        run_world(size, "cpu", fail, rank, how)
    assert caught.value.rank == rank and time.monotonic() - started < 20
    assert ("in fail" in caught.value.details) == (how == "raises")
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_launcher(tmp_path, number):
    """Also when the command itself runs out of memory: no process ends its ranks."""
    starter = multiprocessing.get_context("spawn").Process(
        target=start_and_wait, args=(str(tmp_path),)
    )
    starter.start()
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    assert soon(lambda: all(file.exists() and file.read_text() for file in files), 60)
    ranks = [int(file.read_text()) for file in files]
    assert all(map(runs, ranks))
    os.kill(starter.pid, number)
    starter.join()
    assert starter.exitcode == -number
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
