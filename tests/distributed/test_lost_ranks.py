"""Ranks that never start, die while groups are made, or are late: what the others say, and when."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

from kge_torchrec.distributed import processes as module
from kge_torchrec.distributed.processes import RankLost, processes
from kge_torchrec.embeddings.exchange import exchanged

VICTIM = 1


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def joined_alone(port: int) -> None:
    """Leaves the group of the test's world, and sets what torchrun sets."""
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )


def rank_outlives(port: int, point: str, timeout: float, connect: float) -> tuple[str, float]:
    """The message that ends a rank, and the seconds from its start until then."""
    joined_alone(port)
    victim = int(os.environ["RANK"]) == VICTIM
    started, init = time.monotonic(), dist.init_process_group
    where, detail, how = [*point.split(" ", 2), "", ""][:3]

    def init_and_die(*args, **named):
        """Die a number of milliseconds after the creation of the group begins."""
        if float(detail) == 0:
            die()
        threading.Timer(float(detail) / 1000, die).start()
        init(*args, **named)
        time.sleep(60)

    if victim and where == "connecting":
        dist.init_process_group = init_and_die
    message = "nothing was raised"
    module.CONNECT_SECONDS = connect
    if victim and where == "before":
        die()
    try:
        with processes("cpu", timeout) as ranks:
            if victim and where == "between":
                die()
            time.sleep(float(detail or 0) if victim and where == "late" else 0)
            if how == "by rows":
                exchanged(torch.ones(2, 1), [1, 1], [1, 1], ranks.group)
            dist.all_reduce(torch.ones(1))
            dist.barrier()
    except RankLost as error:
        message = str(error)
    gc.collect()  # the group closes its connections, as at the end of a process
    return message, time.monotonic() - started


def survivors(ranks: int, point: str, timeout: float = 60, connect: float = 1):
    """(message, seconds) of each rank but the victim."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_world(
        ranks, rank_outlives, store.port, point, timeout, connect, may_end=(VICTIM,), timeout=90
    )
    return [result for rank, result in enumerate(results) if rank != VICTIM]


LOST = "another rank died or cannot be reached: the first message"


@pytest.mark.parametrize(
    "ranks, point, words",
    [
        (2, "before", r"rank 1 of 2 did not start within 1 s \(`timeout`\)"),
        (2, "connecting 0", LOST),
        (4, "between", LOST),
    ],
)
def test_survivors_end_in_bounded_time(ranks, point, words):
    for message, seconds in survivors(ranks, point, 1 if point == "before" else 60):
        assert re.search(words, message), message
        assert seconds < 20  # by default a minute, or half an hour


@pytest.mark.parametrize("how", ["", " by rows"])
def test_survivor_reports_a_stuck_rank_after_the_timeout(how):
    for timeout in (1, 3, 9):  # a busy machine may need longer to start a rank
        ((message, seconds),) = survivors(2, f"late 30{how}", timeout)
        if "did not start" not in message:
            break
    words = f"another rank did not answer within {timeout} s: that rank is stuck"
    assert words in message, message
    assert seconds < 20


def test_late_rank_has_the_whole_timeout_after_joining():
    """The short time of connecting ends with it."""
    for connect in (1, 4, 16):  # a busy machine may need longer to connect
        ((message, _),) = survivors(2, f"late {connect + 0.5}", connect=connect)
        if "cannot be reached" not in message:
            break
    assert message == "nothing was raised"
