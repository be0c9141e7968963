"""Exchanges through shared memory: what gloo gives, in any order of waiting; or gloo itself."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from training_runs import config_of, fit, largest_difference, tiny_store, without_checkpoints
from worlds import run_world

from kge_torchrec.config import ConfigError
from kge_torchrec.distributed import mailboxes
from kge_torchrec.distributed.processes import RankLost, processes
from kge_torchrec.distributed.shared_memory import SharedMemoryGroup, with_exchange

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint8, torch.float64)


@contextmanager
def shared_group(transport: str = "shared_memory"):
    with processes("cpu") as ranks:
        yield with_exchange(ranks, transport).exchange


def mapped() -> bool:
    return "memfd:kge_torchrec" in Path("/proc/self/maps").read_text()


def random_exchange(random: np.random.Generator, group: dist.ProcessGroup, largest: int):
    """(work under way, its output, what gloo gives); ``random`` is the same on all ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = random.integers(0, largest, (size, size)) * (random.random((size, size)) < 0.7)
    shape = [(), (1,), (7,), (3, 5)][random.integers(4)]
    dtype = DTYPES[random.integers(len(DTYPES))]
    send, receive = rows[rank].tolist(), rows[:, rank].tolist()
    mine = torch.Generator().manual_seed(int(random.integers(1 << 30)) + rank)
    inputs = torch.randint(0, 100, (sum(send), *shape), generator=mine).to(dtype)
    if random.random() < 0.2 and shape:
        inputs = inputs.transpose(0, -1).contiguous().transpose(0, -1)
    output, expected = (torch.empty(sum(receive), *shape, dtype=dtype) for _ in range(2))
    work = dist.all_to_all_single(output, inputs, receive, send, group=group, async_op=True)
    dist.all_to_all_single(expected, inputs.contiguous(), receive, send)
    return work, output, expected


def rank_exchanges(seed: int, times: int, largest: int) -> None:
    random, under_way = np.random.default_rng(seed), []
    own = np.random.default_rng((seed, dist.get_rank()))  # every rank waits in an order of its own
    with shared_group() as group:
        assert isinstance(group, SharedMemoryGroup)
        for _ in range(times):
            under_way.append(random_exchange(random, group, largest))
            while len(under_way) > own.integers(6):
                work, output, expected = under_way.pop(own.integers(len(under_way)))
                if own.random() < 0.2:
                    continue  # nobody ever waits for it
                assert work.wait() and work.is_completed()
                assert torch.equal(output, expected)
        # a last one brings all that nobody waited for
        dist.all_to_all_single(torch.empty(dist.get_world_size()), torch.ones(1).expand(
            dist.get_world_size()).contiguous(), group=group)  # fmt: skip
        assert not group._under_way


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exchanges_match_gloo_in_any_order_of_waiting(ranks):
    run_world(ranks, rank_exchanges, 1, 60, 40)
    # larger than a new mailbox: it grows, while other messages are in it
    run_world(ranks, rank_exchanges, 2, 12, 9000)


def rank_sends_one_number() -> int:
    rank = dist.get_rank()
    to_other, results = [rank, 1 - rank], torch.empty(1, dtype=torch.int64)
    with shared_group() as group:
        inputs = torch.tensor([7 + rank]).as_strided((1,), (0,))  # as of an expanded number
        dist.all_to_all_single(results, inputs, to_other, to_other, group=group)
    return int(results)


def test_one_element_may_have_any_stride():
    assert run_world(2, rank_sends_one_number) == [8, 7]


def rank_forgets_many(count: int) -> float:
    with shared_group() as group:
        ones = torch.ones(2, 3)
        for _ in range(count):
            dist.all_to_all_single(torch.empty(2, 3), ones, group=group, async_op=True)
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        return float(total)


def test_more_exchanges_than_entries_work():
    assert run_world(2, rank_forgets_many, 3 * mailboxes._KEPT) == [2.0, 2.0]


def exchanged(text: str) -> list[str]:
    texts = [text] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def rank_leaves_one_more_than_fit() -> list[int]:
    """The other rank's messages, none of which is read before all entries are taken."""
    rank, arrived = dist.get_rank(), []
    boxes = mailboxes.Mailboxes(rank, 2, exchanged, 20)

    def receive() -> None:
        while boxes.is_there(len(arrived)):
            arrived.append(int(boxes.part(len(arrived), 1 - rank).view(np.int64)[0]))
            boxes.consumed(len(arrived) - 1)

    for number in range(mailboxes._KEPT + 1):
        boxes.leave([np.array([number]).view(np.uint8)] * 2, receive)
    dist.barrier()
    receive()
    boxes.close()
    return arrived


def test_entries_are_not_reused_before_they_are_read():
    assert run_world(2, rank_leaves_one_more_than_fit) == [list(range(mailboxes._KEPT + 1))] * 2


def test_memory_of_another_program_is_rejected():
    """A process id and a file number may be used again, by a file of the same size."""
    boxes = mailboxes.Mailboxes(0, 1, lambda text: [text], 1)
    (own,) = boxes._boxes
    token = int(own.words[mailboxes._TOKEN])
    again = boxes._open(os.getpid(), own.file, token)
    assert again.words[mailboxes._TOKEN] == token
    with pytest.raises(OSError, match="another one here"):
        boxes._open(os.getpid(), own.file, token + 1)
    os.close(again.file)
    boxes.close()


def rank_sums() -> dict[str, torch.Tensor]:
    results = {}
    rank, size = dist.get_rank(), dist.get_world_size()
    with shared_group() as group:
        for op in ("SUM", "MAX", "MIN", "PRODUCT"):  # the last is gloo's
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64):
                for count in (0, 1, 4097, 300_001):  # the last in parts, on more than two ranks
                    if op == "PRODUCT" and count > 1:
                        continue
                    mine = torch.Generator().manual_seed(rank)
                    inputs = (torch.randn(count, generator=mine) * 100).to(dtype)
                    expected = inputs.clone()
                    dist.all_reduce(expected, getattr(dist.ReduceOp, op))
                    terms = [torch.empty_like(inputs) for _ in range(size)]
                    dist.all_gather(terms, inputs)
                    work = dist.all_reduce(inputs, getattr(dist.ReduceOp, op), group, async_op=True)
                    work.wait()
                    if op != "SUM" or dtype != torch.bfloat16:  # whose sums depend on the order
                        torch.testing.assert_close(inputs, expected, atol=1e-3, rtol=1e-5)
                    if op == "SUM":
                        ordered = terms[0].clone()
                        for term in terms[1:]:
                            ordered += term
                        assert torch.equal(inputs, ordered)  # in order of rank
                    results[f"{op} {dtype} {count}"] = inputs
        apart = torch.arange(12.0).view(3, 4).t()
        dist.all_reduce(apart, group=group)
        assert torch.equal(apart, size * torch.arange(12.0).view(3, 4).t())
        for value in dist.get_rank(group), "text":  # gloo handles other tensors
            box = [value]
            dist.broadcast_object_list(box, src=0, group=group)
            assert box == ([0] if value != "text" else ["text"])
        with pytest.raises(ValueError, match="3 rows cannot be split"):
            dist.all_to_all_single(torch.empty(3), torch.empty(3), [1] * size, [3], group=group)
        dist.barrier(group)
    return results


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_match_gloo_and_are_bitwise_equal_on_all_ranks(ranks):
    first, *rest = run_world(ranks, rank_sums)
    for other in rest:
        assert all(torch.equal(other[name], first[name]) for name in first)


def rank_disagrees() -> str:
    """Rank 1 expects less than rank 0 sends; later collectives still work."""
    rank = dist.get_rank()
    with shared_group() as group:
        output = torch.empty(1 if rank else 2)
        receive = [0, 1] if rank else [1, 1]
        send = [1, 1] if rank else [1, 2]
        message = ""
        try:
            dist.all_to_all_single(output, torch.ones(sum(send)), receive, send, group=group)
        except ValueError as error:
            message = str(error)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total == 2
    return message


def test_mismatched_sizes_are_reported():
    assert run_world(2, rank_disagrees) == ["", "rank 0 sent 8 bytes where 0 were expected"]


# A run


def rank_trains_by(store: Path, folder: Path, engine: str) -> dict[str, dict]:
    ends = {}
    for transport in ("gloo", "shared_memory"):
        config = config_of(
            store, folder / transport, transport=transport, entities__engine=engine,
            checkpoint__every__epochs=0, train__epochs=2,
        )  # fmt: skip
        with processes("cpu"):
            session = fit(config, without_checkpoints)
            ends[transport] = session.parameters
            assert mapped() == (transport == "shared_memory")
    return ends


@pytest.mark.parametrize("engine", ["torchrec", "handrolled"])
def test_parameters_are_bitwise_equal_with_gloo_and_shared_memory(engine, tmp_path):
    store = tiny_store(tmp_path / "store").path
    for ends in run_world(2, rank_trains_by, store, tmp_path, engine):
        assert largest_difference(ends["gloo"], ends["shared_memory"]) == 0


# Ranks that die or leave, and signals


def rank_outlives(how: str) -> tuple[str, float]:
    """Return the error of the surviving rank, and the seconds until it."""
    started = time.monotonic()
    linear = torch.nn.Linear(3, 3)
    with pytest.raises(RankLost) as caught, shared_group() as group:
        wrapped = torch.nn.parallel.DistributedDataParallel(linear, process_group=group)
        dist.all_reduce(torch.ones(5), group=group)
        if dist.get_rank() == 1 and how == "leaves":
            group.shutdown()
            time.sleep(20)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "dies in backward":
            wrapped(torch.ones(2, 3)).sum().backward()
        dist.all_reduce(torch.ones(5), group=group)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("how", ["dies", "dies in backward", "leaves"])
def test_lost_rank_ends_the_other(how):
    (message, seconds), _ = run_world(2, rank_outlives, how, may_end=(1,), timeout=30)
    assert "another rank died or cannot be reached" in message and seconds < 5


def rank_is_interrupted() -> tuple[bool, float]:
    """Return whether an alarm's KeyboardInterrupt interrupted the wait, and the sum afterwards."""
    interrupted, total = False, torch.ones(())
    with shared_group() as group:
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.6)
        work = dist.all_reduce(total, group=group, async_op=True)
        try:
            if dist.get_rank() == 0:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                signal.setitimer(signal.ITIMER_REAL, 0.1)
            work.wait()
        except KeyboardInterrupt:
            interrupted = True
            work.wait()
    return interrupted, float(total)


def test_signals_interrupt_a_waiting_rank():
    assert run_world(2, rank_is_interrupted) == [(True, 2.0), (False, 2.0)]


# Nothing is left, and what happens where it cannot be


def names_of_memory() -> set[str]:
    """Files but for locks: tests of other processes make locks and folders at any time."""
    there = Path("/dev/shm").iterdir() if os.path.isdir("/dev/shm") else ()
    return {path.name for path in there if path.is_file() and not path.name.startswith("sem.")}


def rank_looks_at_memory() -> tuple[bool, bool, set[str]]:
    before = names_of_memory()
    with processes("cpu") as ranks:
        group = with_exchange(ranks, "auto").exchange
        assert with_exchange(ranks, "auto").exchange is group  # one for all backends
        dist.all_to_all_single(torch.empty(2**19), torch.ones(2**19), group=group)
        during = mapped()
        names = names_of_memory() - before  # a killed rank would leave these
        dist.destroy_process_group(group)
    return during, mapped(), names


def test_memory_is_anonymous_and_released():
    assert run_world(2, rank_looks_at_memory) == [(True, False, set())] * 2


def rank_has_no_memory(lacking: int) -> tuple[str, str]:
    def refuse(*_) -> int:
        raise OSError(38, "Function not implemented")

    broken = refuse if dist.get_rank() == lacking else os.memfd_create
    with processes("cpu") as ranks, patch.object(os, "memfd_create", broken):
        assert with_exchange(ranks, "auto").exchange is dist.group.WORLD
        assert with_exchange(ranks, "gloo").exchange is dist.group.WORLD
        with pytest.raises(ConfigError, match="transport shared_memory") as caught:
            with_exchange(ranks, "shared_memory")
        on_cuda = replace(ranks, device=torch.device("cuda"))
        assert with_exchange(on_cuda, "auto").exchange is dist.group.WORLD
    assert not mapped()
    return "gloo", str(caught.value)


def rank_is_elsewhere() -> bool:
    """Rank 1 cannot see rank 0's memory, as in a container of its own."""
    opened = os.open

    def elsewhere(path, *arguments, **keywords):
        if str(path).startswith("/proc/") and dist.get_rank() == 1:
            path = "/dev/null"
        return opened(path, *arguments, **keywords)

    with processes("cpu") as ranks, patch.object(os, "open", elsewhere):
        return with_exchange(ranks, "auto").exchange is dist.group.WORLD


def test_all_ranks_fall_back_to_gloo_together():
    assert len(set(run_world(2, rank_has_no_memory, 1, timeout=20))) == 1
    assert run_world(2, rank_is_elsewhere, timeout=20) == [True, True]


# What ask for no work of gloo's threads, so that its lock cannot be waited for.
WITHOUT_WORK = {"rank", "size", "name", "abort", "set_timeout", "_start_coalescing",
                "_end_coalescing", "_get_backend_name",
                # of PyTorch 2.14
                "_add_ephemeral_timeout", "_enable_collectives_timing",
                "_register_on_completion_hook", "_wait_for_pending_works", "bound_device_id",
                "get_reconfigure_handle", "new_window", "reconfigure", "register_abort_hook",
                "supports_reconfigure", "supports_window", "unregister_abort_hook"}  # fmt: skip


def rank_names_groups() -> tuple[bool, bool]:
    with shared_group() as group:
        world = dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name)
        return world is dist.group.WORLD, group.group_name != world.group_name


def test_group_of_all_ranks_keeps_its_name():
    """FSDP looks groups up by name."""
    assert run_world(2, rank_names_groups) == [(True, True)] * 2


def test_no_collective_reaches_gloo_from_cpp():
    """By torch's C++ it would wait for gloo with the interpreter's lock held."""
    of_both = set(dir(dist.ProcessGroupGloo)) & set(dir(dist.ProcessGroup)) - WITHOUT_WORK
    collectives = {name for name in of_both if not name.startswith(("__", "_pybind11"))}
    collectives = {name for name in collectives if "_sequence_" not in name}
    assert {"allgather", "barrier", "broadcast", "send"} <= collectives
    assert collectives <= set(vars(SharedMemoryGroup))
