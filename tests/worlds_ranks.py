"""A rank: it runs the functions of one world after another, and undoes what each leaves behind.

A process that was forked for one world only would copy thousands of pages while it trains, and
import the test module again.  That took half the time of a small training.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import operator
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from worlds import STACKS, pack, unpack

TESTS = str(Path(__file__).parent)
WORLDS = 100  # of a rank; then another one starts, without the memory that this one has kept


def serve(connection: Connection) -> None:
    """Take part in one world after another, until the tests close the connection."""
    torch.set_num_threads(1)
    BEFORE.begin()
    worlds, stays = 0, True
    while stays:
        try:
            job = connection.recv()
        except EOFError:
            break
        _take_part(connection, *job)
        worlds += 1
        stays = BEFORE.restore() and worlds < WORLDS
        connection.send(stays)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no waiting for threads of gloo or numba


def _take_part(
    connection: Connection,
    rank: int,
    world_size: int,
    folder: str,
    current: str,
    place,
    arguments: bytes,
) -> None:
    connected = False
    stacks = open(f"{folder}/stacks-{rank}", "w")  # noqa: SIM115
    faulthandler.register(STACKS, stacks)
    try:
        os.chdir(current)
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        connected = True
        function = _load(*place)  # first, since the arguments may be of classes of its module
        BEFORE.note_modules()  # before the function changes variables of what was just imported
        connection.send((True, pack(function(*unpack(arguments)))))
        dist.barrier()  # nobody leaves while another still needs its connection
        dist.destroy_process_group()
        faulthandler.unregister(STACKS)
        stacks.close()
    except BaseException:
        connection.send((False if connected else None, traceback.format_exc()))
        time.sleep(60)  # until killed: leaving now would only make the other ranks fail as well
        os._exit(1)


def _load(path: str, module_name: str, name: str) -> Callable:
    """The function ``name`` of the file ``path``, whose module keeps its name for pickle."""
    if module_name == "__main__":
        module_name = "world_main"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], name)


class State:
    """The state of a process that functions may change: environment, random numbers, patches."""

    def __init__(self) -> None:
        self.environ, self.folder, self.path = dict(os.environ), os.getcwd(), list(sys.path)
        self.random = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self.filters = list(warnings.filters)
        self.variables: list[tuple[ModuleType | type, dict[str, Any]]] = []
        self.modules: set[str] = set()
        self.note_modules()

    def begin(self) -> None:
        """Note what differs between the server and the ranks that it forks."""
        self.signals = {number: signal.getsignal(number) for number in _SIGNALS}
        self.fixed = _fixed()

    def restore(self) -> bool:
        """Restore this state; return whether that was possible."""
        for owner, before in self.variables:
            now = map(vars(owner).get, before)
            if not all(map(operator.is_, now, before.values())):  # in C: there are 15,000
                for name, value in before.items():
                    if vars(owner).get(name) is not value:
                        setattr(owner, name, value)
        if os.environ != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        sys.path[:] = self.path
        os.chdir(self.folder)
        torch.set_rng_state(self.random[0])
        np.random.set_state(self.random[1])
        random.setstate(self.random[2])
        warnings.filters[:] = self.filters
        torch.set_flush_denormal(False)
        torch.set_num_threads(1)
        for number, handler in self.signals.items():
            signal.signal(number, handler)
        gc.enable()
        gc.collect()
        gc.freeze()
        self.note_modules()
        return _fixed() == self.fixed

    def note_modules(self) -> None:
        """Note the variables of modules that were imported since, and of their classes."""
        for name in sys.modules.keys() - self.modules:
            self.modules.add(name)
            module = sys.modules[name]
            if _may_be_patched(name, module):
                owned = [v for v in vars(module).values() if getattr(v, "__module__", "") == name]
                owners = [module, *(value for value in owned if isinstance(value, type))]
                self.variables += [(owner, _settable(owner)) for owner in owners]


def _settable(owner: ModuleType | type) -> dict[str, Any]:
    return {k: v for k, v in vars(owner).items() if not k.startswith("__") or callable(v)}


def _may_be_patched(name: str, module: ModuleType) -> bool:
    if name.partition(".")[0] == "kge_torchrec" or name in _WITH_STATE:
        return True
    return str(getattr(module, "__file__", None) or "").startswith(TESTS)


def _fixed() -> dict[str, Any]:
    """Return what cannot be restored: a rank in which this has changed is not used again."""
    return {
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": [t.name for t in threading.enumerate() if t.name != "tqdm_monitor"],
        "limits": [resource.getrlimit(kind) for kind in _LIMITS],
        "group": dist.is_initialized(),
    }


_WITH_STATE = ("torchrec.distributed.collective_utils", "torchrec.distributed.comm")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
            signal.SIGXFSZ)  # fmt: skip
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_DATA)
BEFORE = State()
