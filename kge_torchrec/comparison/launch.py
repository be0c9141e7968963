"""Worlds of local processes: started one after another, watched, and ended with their results.

A world is W processes on this host that join one process group as they would under torchrun. Each
world is fresh, so that one measurement cannot disturb the next. Worlds fork from a server that has
torch and TorchRec imported, which costs a tenth of a second. On CUDA they are spawned, since a
forked process cannot use CUDA. Results travel as JSON files, which survive a rank that is killed.
"""

from __future__ import annotations

import json
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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from kge_torchrec import files
from kge_torchrec.distributed.processes import processes
from kge_torchrec.environment import flush_denormals, installed, silence_dependencies
from kge_torchrec.errors import KGEError

POLL_SECONDS = 0.2
_PRELOADED = ["kge_torchrec.comparison.measurements"]
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "numba")


class RankFailed(KGEError, RuntimeError):
    """A rank of a world raised an exception or died, and the world was ended.

    ``rank`` failed first, for ``reason``. ``partial`` is what rank 0 had kept until then, or None;
    ``details`` the traceback, empty if the rank was killed.
    """

    def __init__(self, rank: int, reason: str, partial: Any = None, details: str = ""):
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.reason, self.partial, self.details = rank, reason, partial, details


class Reporter:
    """Reports what a rank has done and found to the process that started it."""

    def __init__(self, folder: Path, rank: int):
        self._result = _file(folder, "result", rank)
        self._steps = _step_counter(folder) if rank == 0 else None

    def advance(self, steps: int) -> None:
        """Move the progress bar; only rank 0 does."""
        if self._steps is not None:
            self._steps[0] += steps

    def keep(self, results: Any) -> None:
        """Keep results (JSON values) so far, in case this world does not reach its end."""
        write_json(self._result, results)


def run_world(
    work: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    advance: Callable[[int], object] = lambda steps: None,
) -> list[Any]:
    """Return what ``work(reporter, processes, *args)`` returns on each rank of a fresh world.

    No process outlives this call.

    Args:
        work: A module-level function that returns JSON values.
        world_size: Number of ranks.
        args: For ``work``.
        device: As in the config.
        advance: Called with the number of steps since its last call.

    Raises:
        RankFailed: A rank raised an exception or died.
    """
    with tempfile.TemporaryDirectory(prefix="world-") as name:
        folder = Path(name)
        steps, shown = _step_counter(folder), 0
        with _started(folder, world_size, device, (work, args)) as ranks:
            running = [rank.sentinel for rank in ranks]
            while running:
                ended = wait(running, timeout=POLL_SECONDS)
                running = [sentinel for sentinel in running if sentinel not in ended]
                done = int(steps[0])  # read once: the ranks continue meanwhile
                advance(done - shown)
                shown = done
                codes = [rank.exitcode for rank in ranks]
                if any(codes):
                    raise _cause(codes, folder)
        return [read_json(_file(folder, "result", rank)) for rank in range(world_size)]


class World(NamedTuple):
    """The world that a rank joins: its files, its size, and the port of its store."""

    folder: Path
    size: int
    device: str
    port: int


@contextmanager
def _started(
    folder: Path, world_size: int, device: str, task: tuple[Any, ...]
) -> Iterator[list[BaseProcess]]:
    """Start the processes of a world, by rank, and kill those that are left at the end."""
    # The system chooses the port of the store, so no other program can take it meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    ranks = start_processes(
        _rank_main,
        (World(folder, world_size, device, store.port), *task),
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


def _rank_main(rank: int, world: World, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world.size)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(world.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent process has the store, as with torchrun
    )
    silence_dependencies()
    flush_denormals()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = _file(world.folder, "failure", rank)
    try:
        # Twice: a failure must be kept before the connections close, which makes other ranks fail.
        with _failure_kept(file), processes(world.device) as ranks, _failure_kept(file):
            reporter = Reporter(world.folder, rank)
            reporter.keep(work(reporter, ranks, *args))
    except (Exception, KeyboardInterrupt):
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """End this rank when the process that started it is gone, even if it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # every rank was started by another process
    parent.join()
    os._exit(1)


@contextmanager
def _failure_kept(file: Path) -> Iterator[None]:
    """Write the first exception to the file and pass it on."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not file.exists():
            reason = f"raised {type(error).__name__}: {error}".rstrip(": ")
            failure = {"time": time.monotonic(), "reason": reason}
            write_json(file, {**failure, "details": traceback.format_exc()})
        raise


def _cause(codes: list[int | None], folder: Path) -> RankFailed:
    """Return the failure that came first, from the exit codes by rank (None: still running).

    A rank that died is the cause, since the others then raise that their connection is lost.
    Otherwise the cause is the rank that raised first.
    """
    results = _file(folder, "result", 0)
    partial = read_json(results) if results.exists() else None
    failures = {rank: _file(folder, "failure", rank) for rank in range(len(codes))}
    raised = {rank: read_json(file) for rank, file in failures.items() if file.exists()}
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


def _step_counter(folder: Path) -> np.ndarray:
    """Return a counter that two processes share."""
    file = folder / "steps"
    return np.memmap(file, np.int64, mode="r+" if file.exists() else "w+", shape=(1,))


def _file(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"{kind}-{rank}.json"


def machine_facts() -> dict[str, Any]:
    """Return cores, GPUs and versions, without names of hosts or people."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": installed(_PACKAGES),
    }


def write_json(path: Path, value: Any) -> None:
    """Replace a file; a number that is not finite becomes null, since JSON has no such number."""
    files.write_json(path, files.finite(value))


def read_json(path: Path) -> Any:
    """Return what ``write_json`` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
