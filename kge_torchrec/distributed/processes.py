"""The processes of a run: who am I, how many are we, which device is mine.

Ranks agree before they go on: what only rank 0 does (``on_first_rank``) and what each does for
itself but may fail (``on_all_ranks``) ends on every rank alike.  Otherwise the others would wait in
the next collective for a rank that never comes.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from kge_torchrec.config import ConfigError
from kge_torchrec.errors import KGEError, raised_alike

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # preparing a large store keeps the other ranks waiting


@dataclass(frozen=True)
class Processes:
    """This rank's place among the ranks of a run."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    of_rows: dist.ProcessGroup | None = None  # see ``exchange``

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all ranks; a rank that is alone may have none.  Raises RuntimeError if so."""
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no process group: join one by `processes`")
        return group

    @property
    def exchange(self) -> dist.ProcessGroup:
        """Of all ranks: what each step sends rows and gradients by."""
        return self.of_rows or self.group

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, value: T) -> T:
        """Rank 0's picklable value, on every rank.  Collective."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's picklable value, in order of rank, on every rank.  Collective."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest over the ranks of each number, on every rank.  Collective, on the host."""
        if self.world_size == 1:
            return list(values)
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()


def world_size() -> int:
    """How many ranks work together, 1 in a process that is in no group."""
    return dist.get_world_size() if dist.is_initialized() else 1


class RankLost(KGEError, RuntimeError):
    """Another rank died or cannot be reached any more, which this rank met in a collective."""


class OtherRankFailed(KGEError, RuntimeError):
    """Work failed on another rank; the message has its error."""

    on_every_rank = True


def on_first_rank(processes: Processes, work: Callable[[], T]) -> T:
    """Runs ``work()`` on rank 0 and returns its result on every rank; its error too.  Collective.

    So a failure on rank 0 ends all ranks in words instead of leaving them in a collective.
    """
    result: T | None = None
    error: Exception | None = None
    if processes.is_first:
        try:
            result = work()
        except Exception as caught:
            error = raised_alike(caught)
    if processes.world_size > 1:
        result, told = processes.broadcast((result, _sendable(error)))
        error = error or told
    if error is not None:
        raise error
    return cast(T, result)


def on_all_ranks(processes: Processes, work: Callable[[], T]) -> T:
    """Runs ``work()`` on every rank; returns this rank's result once all have one.  Collective.

    Where it fails its own error is raised, on the other ranks OtherRankFailed.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    told = processes.gather(None if error is None else f"{error}" or type(error).__name__)
    failed = [rank for rank, text in enumerate(told) if text is not None]
    if error is not None:
        raise raised_alike(error)
    if failed:
        raise OtherRankFailed(f"rank {failed[0]}: {told[failed[0]]}")
    return cast(T, result)


def _sendable(error: Exception | None) -> Exception | None:
    """The error, or one of the same words if it is of a kind that cannot travel."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return raised_alike(RuntimeError(f"{type(error).__name__}: {error}"))


@contextmanager
def processes(device: str = "auto") -> Iterator[Processes]:
    """Joins the process group that torchrun describes, or makes a group of one without torchrun.

    device: "auto", "cpu" or "cuda".  A group that somebody else made is used and left alone; one
    made here ends with the last of its users, whoever came first: several runs may be open at
    once, and one that nobody closed ends whenever it is collected.
    Raises ConfigError when CUDA is asked for and absent, RankLost when a rank goes missing inside.
    """
    where = _device(device, int(os.environ.get("LOCAL_RANK", 0)))
    _shared.enter(where)
    try:
        world = dist.get_world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        yield Processes(dist.get_rank(), world, local, where)
    except RuntimeError as error:
        if is_lost_connection(error):
            raise RankLost(
                "another rank died or cannot be reached: the first message of the other ranks says "
                "why (none: it was killed, often for memory). `train --resume` goes on from the "
                "last checkpoint, on any number of ranks."
            ) from error
        raise
    finally:
        _shared.leave()


# How gloo, NCCL and the rendezvous store say that somebody is gone.
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|remote process exited"
    r"|ncclremoteerror|timed out waiting|wait timeout|failed to (recv|send)|no route to host",
    re.IGNORECASE,
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed since another rank is gone."""
    if isinstance(error, dist.DistNetworkError):
        return True
    return type(error) in (RuntimeError, dist.DistBackendError) and bool(_LOST.search(str(error)))


class _SharedGroup:
    """Counts the users of the process group that ``processes`` made."""

    def __init__(self) -> None:
        self._users, self._made_here = 0, False
        self._started = 0  # groups so far, the same on every rank

    def enter(self, device: torch.device) -> None:
        if not dist.is_initialized():
            _start(device, self._started)
            self._made_here = True
            self._started += 1
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


def _start(device: torch.device, number: int) -> None:
    # gloo besides NCCL: checkpoints and small objects travel between CPUs.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
        # A store outlives groups: the next one would find the addresses of the one before.
        store = dist.PrefixStore(f"{_attempt()}-group-{number}", store)
    else:
        store, rank, world = dist.HashStore(), 0, 1  # in memory: no free port, host name or file
    store.set_timeout(TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)


def _attempt() -> str:
    """What keeps the ranks that torchrun restarts from meeting those it killed.

    torchrun keeps its store over restarts (pytorch issue 135712), so a rank that is first there
    finds the addresses of the attempt before and tries to reach a process that is gone.  The number
    of restarts tells attempts apart on one host; hosts count theirs each for itself.
    """
    on_one_host = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0) if on_one_host else 0}"
