"""The harness itself: results, errors, deaths and hangs of ranks."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from dataclasses import dataclass

import pytest
import small_model
import torch
import torch.distributed as dist
import worlds
from worlds import WorldError, end_ranks, run_world
from worlds_table import TableModel


def rank_describes(scale: torch.Tensor) -> tuple[torch.Tensor, list[str], int]:
    total = torch.ones(2) * dist.get_rank()
    dist.all_reduce(total)
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    return total * scale, [os.environ[name] for name in names], torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_are_in_rank_order(world_size):
    for rank, (total, names, threads) in enumerate(
        run_world(world_size, rank_describes, torch.tensor(2.0))
    ):
        assert torch.equal(total, torch.full((2,), world_size * (world_size - 1.0)))
        assert names == [str(rank)] * 2 + [str(world_size)] * 2
        assert threads == 1


@dataclass(frozen=True)
class Mine:
    value: int


def rank_doubles(mine: Mine) -> Mine:
    return Mine(2 * mine.value)


def test_classes_of_the_test_module_can_be_sent_and_returned():
    assert run_world(1, rank_doubles, Mine(4)) == [Mine(8)]


def rank_one_raises() -> None:
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def test_traceback_of_the_failed_rank_is_shown():
    with pytest.raises(WorldError, match=r"(?s)rank 1 of 3 raised.*rank_one_raises.*'lost'"):
        run_world(3, rank_one_raises)


def rank_one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


def test_dead_rank_is_reported():
    with pytest.raises(WorldError, match="rank 1 died with exit code 3"):
        run_world(2, rank_one_dies)


def rank_one_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_hanging_rank_is_reported():
    with pytest.raises(WorldError, match=r"(?s)ranks \[1\] not done after 2 s.*rank_one_hangs"):
        run_world(2, rank_one_hangs, timeout=2)


def rank_leaves_traces() -> int:
    os.environ["LEFT_BEHIND"] = "here"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    small_model.DIM = 4
    small_model.write.__globals__["entity_rows"] = None
    TableModel.forward = None
    torch.manual_seed(3)
    return os.getpid()


def rank_looks_for_traces() -> tuple[int, dict]:
    traces = {
        "environment": os.environ.get("LEFT_BEHIND"),
        "folder": os.getcwd(),
        "signal": signal.getsignal(signal.SIGTERM),
        "module": small_model.DIM,
        "function": small_model.entity_rows is None,
        "class": TableModel.forward is None,
        "random": float(torch.rand(1)),
    }
    return os.getpid(), traces


def test_rank_is_used_again_without_traces():
    (_, before), *_ = run_world(1, rank_looks_for_traces)
    end_ranks()  # the next one imports this module in the world that changes it
    process = run_world(1, rank_leaves_traces)[0]
    again, after = run_world(1, rank_looks_for_traces)[0]
    assert again == process and after == before


def rank_process() -> int:
    return os.getpid()


def rank_leaves_a_thread() -> int:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return os.getpid()


def rank_lowers_a_limit() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
    return os.getpid()


@pytest.mark.parametrize("leaves", [rank_leaves_a_thread, rank_lowers_a_limit])
def test_rank_that_cannot_be_restored_is_not_used_again(leaves):
    assert run_world(1, leaves)[0] not in [run_world(1, rank_process)[0] for _ in range(2)]


def test_rank_that_has_ended_is_replaced():
    os.kill(run_world(1, rank_process)[0], signal.SIGKILL)
    time.sleep(0.1)
    assert run_world(1, rank_process)


def test_local_function_is_rejected():
    with pytest.raises(TypeError, match="module-level"):
        run_world(1, lambda: None)


def test_a_world_that_does_not_connect_starts_again(monkeypatch):
    """gloo fails to connect ranks now and then on a busy machine."""
    starts = []

    def fails(*_):
        starts.append(1)
        if len(starts) < worlds.STARTS:
            raise worlds._NotConnected("rank 0 of 2 raised")
        return ["connected"]

    monkeypatch.setattr(worlds, "_run_once", fails)
    assert run_world(2, rank_describes) == ["connected"] and len(starts) == worlds.STARTS
