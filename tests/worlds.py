"""Runs a function in several processes that form one process group, for tests.

``run_world(2, function, argument)`` calls ``function(argument)`` on two gloo ranks.  A rank is a
process that is forked from a server which has torch and TorchRec imported already.  It stays for
later worlds (``worlds_ranks.py``), so a world takes about 0.02 s; the server starts with the first
world (about 5 s) and ends with the test session.

The function is found by file and name, not by import, so it may live in a test module.
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_PRELOADED = [
    "torchrec.distributed.planner",
    "torchrec.distributed.embedding",
    "torchrec.distributed.train_pipeline",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "worlds_ready",
    "worlds_ranks",
]


class WorldError(AssertionError):
    """A rank failed, died or hung; the message has its traceback."""


class _NotConnected(WorldError):
    """gloo did not connect the ranks, which happens now and then on a busy machine."""


class _NotDone(WorldError):
    """Ranks are not done within the time limit."""


STACKS = signal.SIGQUIT  # a rank then writes where it is
STARTS = 3  # of a world whose ranks are not connected
LEAVING = 10.0  # seconds that a rank may take to leave its world


@dataclass
class _Rank:
    """A process that waits for the next world, or is in one."""

    process: BaseProcess
    connection: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


# By number: what torch keeps for a mesh does not know when its process gets another number.
_idle: defaultdict[int, list[_Rank]] = defaultdict(list)


def run_world(
    world_size: int,
    function,
    *args: Any,
    timeout: float = 120.0,
    may_end: tuple[int, ...] = (),
) -> list[Any]:
    """Run ``function(*args)`` on each rank, and return the results in rank order.

    Every rank has one torch thread, a gloo group, and RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE set.  Arguments and results are copied by torch.save, tensors included.
    ``function`` is a module-level function of a file.  Ranks in ``may_end`` may die or stay behind:
    their result is None.

    Raises WorldError if a rank raises (with its traceback), dies, or the world takes longer than
    ``timeout`` seconds.
    """
    for _ in range(STARTS - 1):
        with suppress(_NotConnected):
            return _run_once(world_size, function, args, timeout, may_end)
    return _run_once(world_size, function, args, timeout, may_end)


def end_ranks() -> None:
    """End the ranks that wait for the next world."""
    for ranks in _idle.values():
        while ranks:
            ranks.pop().end()


def _run_once(world_size: int, function, args, timeout: float, may_end) -> list[Any]:
    place, arguments = _locate(function), pack(args)
    taken = [_idle[n].pop() if _idle[n] else _forked() for n in range(world_size)]
    stay: set[int] = set()
    try:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for number, rank in enumerate(taken):
                    job = number, world_size, folder, os.getcwd(), place, arguments
                    rank.connection.send(job)
            except OSError:
                raise _NotConnected("a rank died between two worlds") from None
            try:
                results = _collect(taken, time.monotonic() + timeout, timeout, may_end)
            except _NotDone as error:
                raise WorldError(f"{error}\n{_stacks(taken, folder)}") from None
            if not may_end:  # ranks that may end cannot meet at the end
                stay = {number for number, rank in enumerate(taken) if _stays(rank)}
        return results
    finally:
        for number, rank in enumerate(taken):
            if number in stay:
                _idle[number].append(rank)
            else:
                rank.end()


def _forked() -> _Rank:
    ours, theirs = _context().Pipe()
    process = _context().Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Rank(process, ours)


def _serve(connection: Connection) -> None:
    from worlds_ranks import serve

    serve(connection)


def _stays(rank: _Rank) -> bool:
    """Wait until the rank has left its world; return whether it can be in another."""
    try:
        return rank.connection.poll(LEAVING) and rank.connection.recv()
    except (EOFError, ConnectionError):
        return False


def _collect(ranks: list[_Rank], deadline: float, timeout: float, may_end) -> list[Any]:
    results: dict[int, Any] = dict.fromkeys(may_end)
    waiting = {rank.connection: n for n, rank in enumerate(ranks) if n not in may_end}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise _NotDone(f"ranks {sorted(waiting.values())} not done after {timeout:g} s")
        for connection in ready:
            number = waiting.pop(connection)
            try:
                succeeded, payload = connection.recv()
            except (EOFError, ConnectionError):
                process = ranks[number].process
                process.join(timeout=5)
                raise WorldError(f"rank {number} died with exit code {process.exitcode}") from None
            if not succeeded:
                kind = WorldError if succeeded is False else _NotConnected
                raise kind(f"rank {number} of {len(ranks)} raised\n{payload}")
            results[number] = unpack(payload)
    return [results[number] for number in range(len(ranks))]


def _stacks(ranks: list[_Rank], folder: str) -> str:
    """Return where each rank is now, all threads."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid, STACKS)
    time.sleep(0.5)  # they write
    files = sorted(Path(folder).glob("stacks-*"))
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)


def _locate(function) -> tuple[str, str, str]:
    """(file, module, name) of a module-level function."""
    if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
        raise TypeError(f"{function.__qualname__} must be a module-level function")
    return function.__code__.co_filename, function.__module__, function.__qualname__


def pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


@functools.cache
def _context():
    """Start the server. That of Python 3.11 looks for modules only in PYTHONPATH."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return context
