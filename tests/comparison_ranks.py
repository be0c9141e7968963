"""Work of ranks in the tests of launching; a started process has to import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from kge_torchrec.comparison.launch import Reporter, run_world
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.environment import peak_resident_bytes

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def describe(reporter: Reporter, ranks: Processes, word: str) -> dict:
    total = torch.tensor(float(ranks.rank + 1))
    dist.all_reduce(total)
    reporter.advance(3)
    return {
        "word": word,
        "total": float(total),
        "variables": [os.environ[name] for name in VARIABLES],
        "nan": float("nan"),
        "flushed": float(torch.tensor(1e-39) * 1.0) == 0,
    }


def take_many_steps(reporter: Reporter, ranks: Processes) -> None:
    for _ in range(100):
        reporter.advance(1)
        time.sleep(0.005)


def raise_on_rank_one(reporter: Reporter, ranks: Processes) -> None:
    """The others lose the connection and raise as well."""
    reporter.keep({"so far": ranks.rank})
    ranks.barrier()
    if ranks.rank == 1:
        raise ValueError("no such thing")
    dist.all_reduce(torch.ones(1))


def die_on_last_rank(reporter: Reporter, ranks: Processes, how: int) -> None:
    """how: a signal, or 0 to leave with exit code 3."""
    reporter.keep([1, 2])
    ranks.barrier()
    if ranks.rank == ranks.world_size - 1:
        if how:
            os.kill(os.getpid(), how)
            signal.pause()
        os._exit(3)
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


def use_memory(reporter: Reporter, ranks: Processes, size: int) -> dict:
    """The peak before and after ``size`` bytes are used, and after they are freed again."""
    peaks = [peak_resident_bytes()]
    held = np.ones(size, dtype=np.uint8)
    peaks.append(peak_resident_bytes())
    del held
    return {"peaks": [*peaks, peak_resident_bytes()]}


def tell_and_wait(reporter: Reporter, ranks: Processes, folder: str) -> None:
    """Writes this process's id to the folder, then waits for somebody to end it."""
    (Path(folder) / f"pid-{ranks.rank}").write_text(str(os.getpid()))
    time.sleep(600)


def start_and_wait(folder: str) -> None:
    run_world(tell_and_wait, 2, folder)
