"""The process group lasts as long as its last user; groups of other programs are untouched."""

import gc

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.embeddings.backend import EntityShard


def test_group_of_one_is_created_and_destroyed():
    assert not dist.is_initialized()
    with processes("cpu") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_first) == (0, 1, True)
        assert ranks.broadcast("value") == "value"
    assert not dist.is_initialized()


def test_process_without_group_can_read_a_model():
    one_rank = Processes(0, 1, 1, torch.device("cpu"))
    shard = EntityShard(torch.arange(20.0).view(5, 4), 0, 5)
    assert shard.fetch(torch.tensor([4])).tolist() == [[16.0, 17.0, 18.0, 19.0]]
    with pytest.raises(RuntimeError, match="no process group: join one"):
        _ = one_rank.group


def test_group_outlives_its_creator():
    first, second = processes("cpu"), processes("cpu")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dist.is_initialized()
    second.__exit__(None, None, None)
    assert not dist.is_initialized()


def test_abandoned_user_does_not_destroy_the_group():
    abandoned = processes("cpu")
    abandoned.__enter__()
    with processes("cpu"):
        del abandoned
        gc.collect()
        assert dist.is_initialized()
    assert not dist.is_initialized()


def group_left_alone() -> bool:
    with processes("cpu"):
        pass
    return dist.is_initialized()


def test_foreign_group_is_not_destroyed():
    assert run_world(2, group_left_alone) == [True, True]
