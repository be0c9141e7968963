"""Work of ranks in the tests of worlds; a started process has to import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from kge_torchrec.distributed.processes import Processes
from kge_torchrec.distributed.worlds import run_world


def describe(ranks: Processes, word: str) -> tuple:
    total = torch.tensor(float(ranks.rank + 1))
    dist.all_reduce(total)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    flushed = float(torch.tensor(1e-39) * 1.0) == 0
    return word, float(total), [os.environ[name] for name in names], flushed


def fail(ranks: Processes, rank: int, how: str) -> None:
    """One rank raises, ends late or dies by a signal; the others wait for it.

    A rank that leaves late has closed its connections a second before it ends, as a process does
    that frees much memory.
    """
    ranks.barrier()
    if ranks.rank == rank:
        if how == "leaves late":
            dist.destroy_process_group()
            time.sleep(1)
            os._exit(3)
        if how == "raises":
            raise ValueError("no such thing")
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


def tell_and_wait(ranks: Processes, folder: str) -> None:
    """Writes this process's id to the folder, then waits for somebody to end it."""
    (Path(folder) / f"pid-{ranks.rank}").write_text(str(os.getpid()))
    time.sleep(600)


def start_and_wait(folder: str) -> None:
    run_world(2, "cpu", tell_and_wait, folder)
