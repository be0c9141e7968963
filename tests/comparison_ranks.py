"""Work of ranks in the tests of worlds; a started process has to import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from kge_torchrec.comparison import run_world
from kge_torchrec.distributed.processes import Processes

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def describe(ranks: Processes, word: str) -> dict:
    total = torch.tensor(float(ranks.rank + 1))
    dist.all_reduce(total)
    return {
        "word": word,
        "total": float(total),
        "variables": [os.environ[name] for name in VARIABLES],
        "flushed": float(torch.tensor(1e-39) * 1.0) == 0,
    }


def raise_on_rank_one(ranks: Processes) -> None:
    """The others lose the connection and raise as well."""
    ranks.barrier()
    if ranks.rank == 1:
        raise ValueError("no such thing")
    dist.all_reduce(torch.ones(1))


def die_on_last_rank(ranks: Processes, how: int) -> None:
    """how: a signal, or 0 to leave with exit code 3."""
    ranks.barrier()
    if ranks.rank == ranks.world_size - 1:
        if how:
            os.kill(os.getpid(), how)
            signal.pause()
        os._exit(3)
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


def tell_and_wait(ranks: Processes, folder: str) -> None:
    """Writes this process's id to the folder, then waits for somebody to end it."""
    (Path(folder) / f"pid-{ranks.rank}").write_text(str(os.getpid()))
    time.sleep(600)


def start_and_wait(folder: str) -> None:
    run_world(2, "cpu", tell_and_wait, folder)
