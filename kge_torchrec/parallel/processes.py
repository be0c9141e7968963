"""The processes of a run: who am I, how many are we, which device is mine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from kge_torchrec.config import ConfigError

TIMEOUT = timedelta(minutes=30)  # preparing a large store keeps the other ranks waiting


@dataclass(frozen=True)
class Processes:
    """This rank's place among the ranks of a run."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, value):
        """Rank 0's picklable value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


def on_first_rank(processes: Processes, work):
    """Runs ``work()`` on rank 0 and returns its result on every rank; its error too.

    So a failure on rank 0 ends all ranks in words instead of leaving them in a collective.
    """
    result = error = None
    if processes.is_first:
        try:
            result = work()
        except Exception as caught:
            error = caught
            error.on_every_rank = True  # so that one of them may speak for all
    result, error = processes.broadcast((result, error))
    if error is not None:
        raise error
    return result


@contextmanager
def processes(device: str = "auto") -> Iterator[Processes]:
    """Joins the process group that torchrun describes, or makes a group of one without torchrun.

    device: "auto", "cpu" or "cuda".  A group that somebody else made is used and left alone; one
    made here ends with the last of its users, whoever came first: several runs may be open at
    once, and one that nobody closed ends whenever it is collected.
    Raises ConfigError when CUDA is asked for and absent.
    """
    where = _device(device, int(os.environ.get("LOCAL_RANK", 0)))
    _shared.enter(where)
    try:
        world = dist.get_world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        yield Processes(dist.get_rank(), world, local, where)
    finally:
        _shared.leave()


class _SharedGroup:
    """Counts the users of the process group that ``processes`` made."""

    def __init__(self) -> None:
        self._users, self._made_here = 0, False

    def enter(self, device: torch.device) -> None:
        if not dist.is_initialized():
            _start(device)
            self._made_here = True
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0 and self._made_here:
            self._made_here = False
            if dist.is_initialized():
                dist.destroy_process_group()


_shared = _SharedGroup()


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch finds no CUDA device")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        error = ConfigError(
            f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()}; "
            "start at most one process per GPU"
        )
        error.on_every_rank = False
        raise error
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _start(device: torch.device) -> None:
    # gloo besides NCCL: checkpoints and small objects travel between CPUs.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT)
        return
    store = dist.HashStore()  # in memory: needs no free port, no host name, no file
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
