"""Worlds of local processes, one after another: started, watched, and ended with what they found.

A world is W processes on this host that join one process group as they would under torchrun.  Each
world is fresh, so that one measurement cannot disturb the next; it is forked from a server that has
torch and TorchRec imported (on CUDA spawned, since a forked process cannot use CUDA), which costs a
tenth of a second.  What a rank finds travels as JSON files, which survive a rank that is killed,
with a description of the machine without names of hosts or people.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from kge_torchrec import files
from kge_torchrec.distributed.processes import processes
from kge_torchrec.environment import flush_denormals, installed, silence_dependencies
from kge_torchrec.errors import KGEError

POLL_SECONDS = 0.2
_PRELOADED = ["kge_torchrec.comparison.lockstep", "kge_torchrec.comparison.speed"]


class RankFailed(KGEError, RuntimeError):
    """A rank of a world raised or died, and the world was ended.

    rank: the one it began with.  partial: what rank 0 had kept until then, or None.
    details: the traceback of that rank, empty if it was killed.
    """

    def __init__(self, rank: int, reason: str, partial: Any = None, details: str = ""):
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.reason, self.partial, self.details = rank, reason, partial, details


class Reporter:
    """How a rank tells the starting process what it has done and found."""

    def __init__(self, folder: Path, rank: int):
        self._folder, self._rank = folder, rank
        self._steps = _steps_done(folder) if rank == 0 else None

    def advance(self, steps: int) -> None:
        """Moves the progress bar; only rank 0 does."""
        if self._steps is not None:
            self._steps[0] += steps

    def keep(self, found: Any) -> None:
        """Keeps what was found so far, should this world not reach its end.  JSON values only."""
        write_json(_result(self._folder, self._rank), found)


def run_world(
    work: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    advance: Callable[[int], object] = lambda steps: None,
) -> list[Any]:
    """What ``work(reporter, processes, *args)`` returned on each rank of a fresh world, by rank.

    work: a module-level function that returns JSON values.  device: as in the config.  advance:
    called with the number of steps done since its last call.  No process outlives this call.
    Raises RankFailed when a rank raises or dies.
    """
    with tempfile.TemporaryDirectory(prefix="world-") as name:
        folder = Path(name)
        steps, shown = _steps_done(folder), 0
        with _started(world_size, (work, args, device, name)) as ranks:
            running = [rank.sentinel for rank in ranks]
            while running:
                ended = wait(running, timeout=POLL_SECONDS)
                running = [sentinel for sentinel in running if sentinel not in ended]
                done = int(steps[0])  # read once: the ranks go on meanwhile
                advance(done - shown)
                shown = done
                codes = [rank.exitcode for rank in ranks]
                if any(codes):
                    raise _cause(codes, folder)
        return [read_json(_result(folder, rank)) for rank in range(world_size)]


@contextmanager
def _started(world_size: int, task: tuple[Any, ...]) -> Iterator[list[BaseProcess]]:
    """The running processes of a world, by rank; killed if they are still there at the end."""
    work, args, device, folder = task
    # Where the ranks meet, on a port that the system chose: nobody else can take it meanwhile.
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    ranks = start_processes(
        _rank_main,
        (work, args, device, folder, world_size, meeting.port),
        nprocs=world_size,
        join=False,
        daemon=True,
        start_method="forkserver" if device == "cpu" else "spawn",
    ).processes
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()


def _rank_main(
    rank: int,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    folder: str,
    world_size: int,
    port: int,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the starting process's, as torchrun's
    )
    silence_dependencies()
    flush_denormals()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = _failure(Path(folder), rank)
    try:
        # Twice, since a failure is to be kept before the connections close: then others fail too.
        with _failure_kept(file), processes(device) as ranks, _failure_kept(file):
            reporter = Reporter(Path(folder), rank)
            reporter.keep(work(reporter, ranks, *args))
    except (Exception, KeyboardInterrupt):
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """The starting process ends its ranks, unless it is killed: then they would go on alone."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # every rank was started by another process
    parent.join()
    os._exit(1)


@contextmanager
def _failure_kept(file: Path) -> Iterator[None]:
    """Writes an exception down, the first one only, and passes it on."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not file.exists():
            failure = {
                "time": time.monotonic(),
                "reason": f"raised {type(error).__name__}: {error}".rstrip(": "),
                "details": traceback.format_exc(),
            }
            write_json(file, failure)
        raise


def _cause(codes: list[int | None], folder: Path) -> RankFailed:
    """The failure that came first.

    codes: exit codes by rank, None for those still running.  A rank that died is the cause, since
    the others then raise that their connection is lost; otherwise it is the one that raised first.
    """
    partial = read_json(_result(folder, 0)) if _result(folder, 0).exists() else None
    raised = {
        rank: read_json(_failure(folder, rank))
        for rank in range(len(codes))
        if _failure(folder, rank).exists()
    }
    for rank, code in enumerate(codes):
        if code and rank not in raised:
            return RankFailed(rank, _death(code), partial)
    rank, first = min(raised.items(), key=lambda item: item[1]["time"])
    return RankFailed(rank, first["reason"], partial, first["details"])


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    memory = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{memory}"


def _steps_done(folder: Path) -> np.ndarray:
    """A counter that two processes share."""
    file = folder / "steps"
    mode: Literal["r+", "w+"] = "r+" if file.exists() else "w+"
    return np.memmap(file, dtype=np.int64, mode=mode, shape=(1,))


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.json"


def _failure(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "numba")


def machine_facts() -> dict[str, Any]:
    """Cores, GPUs and the versions that matter."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cores": cores,
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": installed(_PACKAGES),
    }


def write_json(path: Path, value: Any) -> None:
    """Replaces the file; a number that is not finite becomes null, which JSON has in its place."""
    files.write_json(path, _finite(value))


def read_json(path: Path) -> Any:
    """What ``write_json`` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
