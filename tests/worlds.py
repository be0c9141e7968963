"""Runs a function in several processes that form one process group, for tests.

``run_world(2, function, argument)`` calls ``function(argument)`` on two gloo ranks.  Processes are
forked from a server that has torch and TorchRec imported already, so a world takes about 0.1 s;
the server starts with the first world (about 5 s) and ends with the test session.

The function is found by file and name, not by import, so it may live in a test module.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

_PRELOADED = [
    "torchrec.distributed.planner",
    "torchrec.distributed.embedding",
    "torchrec.distributed.train_pipeline",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "worlds_ready",
]


class WorldError(AssertionError):
    """A rank failed, died or hung; the message has its traceback."""


class _NotConnected(WorldError):
    """gloo did not connect the ranks, which happens now and then on a busy machine."""


STARTS = 3  # of a world whose ranks are not connected


def run_world(
    world_size: int, function, *args: Any, timeout: float = 120.0, may_end: tuple[int, ...] = ()
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


def _run_once(world_size: int, function, args, timeout: float, may_end) -> list[Any]:
    context = _context()
    place, arguments = _locate(function), _pack(args)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, folder, place, arguments, sender),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout, timeout, may_end)
        finally:
            if may_end:
                _kill(processes)  # they cannot meet at the end
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes, processes, deadline: float, timeout: float, may_end) -> list[Any]:
    results: dict[int, Any] = dict.fromkeys(may_end)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in may_end}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            _kill(processes)
            raise WorldError(f"ranks {sorted(waiting.values())} not done after {timeout:g} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                succeeded, payload = pipe.recv()
            except EOFError:
                processes[rank].join(timeout=5)
                _kill(processes)
                raise WorldError(
                    f"rank {rank} died with exit code {processes[rank].exitcode}"
                ) from None
            if not succeeded:
                _kill(processes)
                kind = WorldError if succeeded is False else _NotConnected
                raise kind(f"rank {rank} of {len(processes)} raised\n{payload}")
            results[rank] = _unpack(payload)
    return [results[rank] for rank in range(len(pipes))]


def _kill(processes) -> None:
    for process in processes:
        process.kill()


def _rank_main(rank: int, world_size: int, folder: str, place, arguments: bytes, sender) -> None:
    connected = False
    try:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank)):
            os.environ[name] = str(value)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        connected = True
        function = _load(*place)  # first, since the arguments may be of classes of its module
        sender.send((True, _pack(function(*_unpack(arguments)))))
        dist.barrier()  # nobody leaves while another still needs its connection
        dist.destroy_process_group()
    except BaseException:
        sender.send((False if connected else None, traceback.format_exc()))
        time.sleep(60)  # until killed: leaving now would only make the other ranks fail as well
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no waiting for threads of gloo or numba


def _locate(function) -> tuple[str, str, str]:
    """(file, module, name) of a module-level function."""
    if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
        raise TypeError(f"{function.__qualname__} must be a module-level function")
    return function.__code__.co_filename, function.__module__, function.__qualname__


def _load(path: str, module_name: str, name: str):
    """The function ``name`` of the file ``path``, whose module keeps its name for pickle."""
    if module_name == "__main__":
        module_name = "world_main"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], name)


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


@functools.cache
def _context():
    """Start the server. That of Python 3.11 looks for modules only in PYTHONPATH."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return context
