"""The processes of a run: who am I, how many are we, which device is mine.

Ranks agree before they go on: what only rank 0 does (``on_first_rank``) and what each does for
itself but may fail (``on_all_ranks``) ends on every rank alike.  Otherwise the others would wait in
the next collective for a rank that never comes.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.errors import KGEError, raised_alike

T = TypeVar("T")

# Seconds for each connection between ranks that have all checked in.  The store does not notice
# that a rank dies meanwhile, so the other ranks wait this long; gloo tries up to five times.
CONNECT_SECONDS = 20.0


@dataclass(frozen=True)
class Processes:
    """This rank's place among the ranks of a run."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    timeout: float = Config.timeout  # seconds that this rank waits for another one
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
    """Another rank never started, died, or did not answer in time."""


class RankGone(dist.DistNetworkError):
    """A collective failed because of one rank.

    Args:
        rank: The rank that is gone.
        place: Its process and host.
        timed_out: The rank did not answer in time, but may be alive.
    """

    def __init__(self, rank: int, place: str, timed_out: bool) -> None:
        how = "wait timeout" if timed_out else "connection closed"
        super().__init__(f"{how}: rank {rank} ({place})")
        self.name, self.timed_out = f"rank {rank}, {place}", timed_out


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
def processes(device: str = "auto", timeout: float = Config.timeout) -> Iterator[Processes]:
    """Joins the process group that torchrun describes, or makes a group of one without torchrun.

    device: "auto", "cpu" or "cuda".  A group that somebody else made is used and left alone, with
    its own timeout; one made here ends with the last of its users, whoever came first: several runs
    may be open at once, and one that nobody closed ends whenever it is collected.
    timeout: seconds that a rank waits for another one, to join and in each collective.
    Raises ConfigError when CUDA is asked for and absent, RankLost when a rank goes missing inside.
    """
    where = _device(device, int(os.environ.get("LOCAL_RANK", 0)))
    try:
        _shared.enter(where, timeout)
        try:
            world = dist.get_world_size()
            local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
            yield Processes(dist.get_rank(), world, local, where, timeout)
        finally:
            _shared.leave()
    except RuntimeError as error:
        if is_lost_connection(error):
            raise RankLost(_explained(error, timeout)) from error
        raise


# How gloo, NCCL and the rendezvous store say that somebody is gone.
_TIMED_OUT = r"timed out waiting|wait timeout|timed out after"
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|remote process exited"
    rf"|ncclremoteerror|{_TIMED_OUT}|failed to (recv|send)|no route to host|connectfullmesh failed",
    re.IGNORECASE,
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed since another rank is gone."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return type(error) in (RuntimeError, dist.DistBackendError) and bool(_LOST.search(str(error)))


def _explained(error: BaseException, timeout: float | None) -> str:
    """Say which rank is gone, as far as this rank can know, and what to do.

    timeout: seconds that this rank has waited, if a longer time could help.
    """
    if isinstance(error, RankGone):
        names, timed_out = [error.name], error.timed_out
    else:
        names = _shared.ended_ranks()
        timed_out = not names and bool(re.search(_TIMED_OUT, str(error), re.IGNORECASE))
    who = f" ({'; '.join(names)})" if names else ""
    go_on = "`train --resume` goes on from the last checkpoint, on any number of ranks."
    if timed_out and timeout is not None:
        return (
            f"another rank did not answer within {timeout:g} s{who}: it is stuck, cannot be "
            f"reached, or needs longer, for which set `timeout` (in seconds). {go_on}"
        )
    return (
        f"another rank died or cannot be reached{who}: the first message of the other ranks says "
        f"why (none: it was killed, often for memory). {go_on}"
    )


class _SharedGroup:
    """Counts the users of the process group that ``processes`` made."""

    def __init__(self) -> None:
        self._users, self._made_here = 0, False
        self._started = 0  # groups so far, the same on every rank
        self._places: list[str] = []  # "process PID on HOST" of each rank, where it is known

    def enter(self, device: torch.device, timeout: float) -> None:
        if not dist.is_initialized():
            self._places.clear()
            _start(device, self._started, timeout, self._places)
            self._made_here = True
            self._started += 1
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0 and self._made_here:
            self._made_here = False
            if dist.is_initialized():
                dist.destroy_process_group()

    def ended_ranks(self) -> list[str]:
        """The ranks of this host whose processes have ended: "rank R, process PID on HOST"."""
        here = f" on {socket.gethostname()}"
        local = {
            f"rank {rank}, {place}": int(place.split()[1])
            for rank, place in enumerate(self._places)
            if place.endswith(here) and place != _place()
        }
        deadline = time.monotonic() + 0.5  # a process closes its connections before it ends
        while True:
            ended = [name for name, process in local.items() if _has_ended(process)]
            if ended or not local or time.monotonic() > deadline:
                return ended
            time.sleep(0.02)


_shared = _SharedGroup()


def _place() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _has_ended(process: int) -> bool:
    if not hasattr(os, "pidfd_open"):  # not Linux: a process that nobody waited for counts as alive
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        return False
    try:
        file = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        return bool(select.select([file], [], [], 0)[0])
    finally:
        os.close(file)


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


def _start(device: torch.device, number: int, timeout: float, places: list[str]) -> None:
    """Makes the group of all ranks, and fills in ``places``.  Raises RankLost."""
    # gloo besides NCCL: checkpoints and small objects travel between CPUs.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        own = dist.HashStore()  # in memory: no free port, host name or file
        dist.init_process_group(backend, store=own, rank=0, world_size=1)
        return
    limit = timedelta(seconds=timeout)
    try:
        shared, rank, world = next(dist.rendezvous("env://", timeout=limit))
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RankLost(
            f"not all {os.environ['WORLD_SIZE']} ranks came to {place} within {timeout:g} s "
            f"(`timeout`): {str(error).splitlines()[0]}"
        ) from error
    # A store outlives groups: the next one would find the addresses of the one before.
    store = dist.PrefixStore(f"{_attempt()}-group-{number}", shared)
    places += _check_in(store, rank, world, timeout)
    connecting = min(limit, timedelta(seconds=CONNECT_SECONDS))
    store.set_timeout(connecting)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=connecting
        )
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise RankLost(_explained(error, None)) from error
    store.set_timeout(limit)
    dist.distributed_c10d._set_pg_timeout(limit)


def _check_in(store: dist.Store, rank: int, world: int, timeout: float) -> list[str]:
    """Waits until every rank is there; returns their places.  Raises RankLost.

    It asks again and again, so that Ctrl-C ends it.
    """
    store.set(f"place-{rank}", _place())
    keys = [f"place-{other}" for other in range(world)]
    deadline, pause = time.monotonic() + timeout, 0.005
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            raise RankLost(
                f"rank {', '.join(missing)} of {world} did not start within {timeout:g} s "
                "(`timeout`): its own messages say why, or the program that starts the ranks does"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return [place.decode() for place in store.multi_get(keys)]


def _attempt() -> str:
    """What keeps the ranks that torchrun restarts from meeting those it killed.

    torchrun keeps its store over restarts (pytorch issue 135712), so a rank that is first there
    finds the addresses of the attempt before and tries to reach a process that is gone.  The number
    of restarts tells attempts apart on one host; hosts count theirs each for itself.
    """
    on_one_host = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0) if on_one_host else 0}"
