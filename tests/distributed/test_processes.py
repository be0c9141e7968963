"""The process group lasts as long as its last user; groups of other programs are untouched."""

import gc
import socket

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import Processes, RankLost, processes, rows_by_rank
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


@pytest.fixture
def environment(monkeypatch):
    """Set variables as torchrun does, for rank 0 at a free port of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def set_variables(**values: str) -> str:
        names = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in {**names, **values}.items():
            monkeypatch.setenv(name, value)
        return str(port)

    return set_variables


def test_variables_left_from_another_program(environment, monkeypatch):
    port = environment(WORLD_SIZE="2")
    words = rf"connected to 127.0.0.1:{port} within.*env -u RANK -u WORLD_SIZE|did not start within"
    with pytest.raises(RankLost, match=words):
        processes("cpu", 1).__enter__()
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE are set, and MASTER_ADDR"):
        processes("cpu", 1).__enter__()


def test_port_of_another_program(environment):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        environment(WORLD_SIZE="1", MASTER_PORT=port)
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use by another pro"):
            processes("cpu", 2).__enter__()


def small_values():
    with processes("cpu") as ranks:
        number = ranks.rank
        return ranks.largest([number, -number]), ranks.gather(number), ranks.broadcast(number)


def test_small_values_of_ranks_are_the_same_everywhere():
    assert run_world(2, small_values) == [([1, 0], [0, 1], 0)] * 2


def test_rows_are_split_over_ranks_without_a_gap():
    assert rows_by_rank(7, 3) == [range(3), range(3, 6), range(6, 7)]
    assert rows_by_rank(2, 4) == [range(1), range(1, 2), range(2, 2), range(2, 2)]
