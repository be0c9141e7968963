"""Worlds: new processes on this host, one per rank, that call a function and end."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from kge_torchrec.distributed.processes import RankLost, processes
from kge_torchrec.environment import flush_denormals, silence_dependencies
from kge_torchrec.errors import KGEError


class RankFailed(KGEError, RuntimeError):
    """A rank of a world raised an exception or died, and the world was ended.

    ``rank`` failed first, for ``reason``; ``details`` is the traceback, empty if it was killed.
    """

    def __init__(self, rank: int, reason: str, details: str = ""):
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.reason, self.details = rank, reason, details


def run_world(size: int, device: str, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what ``work(processes, *args)`` returns on each rank of a world of new processes.

    The processes are on this host, and none of them outlives this process. On a CPU they fork from
    a server that has imported the module of ``work``.

    Raises:
        RankFailed: A rank raised an exception or died.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([work.__module__])
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="compare-") as logs:
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id="compare",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="forkserver" if device == "cpu" else "spawn",
            signals_to_handle="",  # Python's own handlers stay, such as KeyboardInterrupt
        )
        try:
            results = elastic_launch(launch, _run_rank)(device, work, args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raised = failure.error_file_data.get("message")
            if isinstance(raised, dict):
                details = raised["extraInfo"]["py_callstack"]
                raise RankFailed(rank, f"raised {raised['message']}", details) from None
            if failure.exitcode > 0:
                raise RankFailed(rank, f"ended with exit code {failure.exitcode}") from None
            name = signal.Signals(-failure.exitcode).name
            memory = " (the kernel does this when memory runs out)" * (name == "SIGKILL")
            raise RankFailed(rank, f"was killed by {name}{memory}") from None
        finally:
            logger.setLevel(level)
    return [results[rank] for rank in range(size)]


def _run_rank(device: str, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the rank without a traceback
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    silence_dependencies()
    flush_denormals()
    try:
        with processes(device) as ranks:
            return work(ranks, *args)
    except RankLost:
        time.sleep(2)  # so that the launcher sees the rank first that is lost
        raise


def _end_with_launcher() -> None:
    """End this rank when the process that started it is gone, even if it was killed."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None  # every rank was started by another process
    launcher.join()
    os._exit(1)
