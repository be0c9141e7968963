"""The harness itself: results, errors, deaths and hangs of ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from worlds import WorldError, run_world


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
    with pytest.raises(WorldError, match=r"(?s)ranks \[1\] not done after 1 s.*rank_one_hangs"):
        run_world(2, rank_one_hangs, timeout=1)
