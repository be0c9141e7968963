"""The processes of a run: rank, world size, device, process group and shared failures.

Work that only rank 0 does (``on_first_rank``) and work that may fail on one rank
(``on_all_ranks``) succeeds or fails on all ranks together.  Otherwise the other ranks would wait in
the next collective for a rank that has already failed.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.errors import KGEError, raised_alike

T = TypeVar("T")

# Seconds to connect two ranks after all ranks have checked in.  The store does not notice a rank
# that dies meanwhile, so the other ranks wait this long; gloo tries up to five times.
CONNECT_SECONDS = 20.0
_ALONE = "unset RANK and WORLD_SIZE (env -u RANK -u WORLD_SIZE kge-torchrec ...)"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Processes:
    """This rank's place among the ranks of a run."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    timeout: float = Config.timeout  # seconds to wait for another rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks.

        Raises:
            RuntimeError: There is no group, which is possible with a single rank.
        """
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no process group: join one by `processes`")
        return group

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, value: T) -> T:
        """Return rank 0's picklable value on every rank.  Collective."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return the picklable values of all ranks, in order of rank.  Collective."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise maximum over the ranks, on every rank.  Collective, on the CPU."""
        if self.world_size == 1:
            return list(values)
        maxima = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return maxima.tolist()


ALONE = Processes(0, 1, 1, torch.device("cpu"))  # without a process group


class Rows(NamedTuple):
    """Rows of a named tensor on this rank.  A checkpoint is written from them and fills them.

    A rank may have several of one name, such as the runs of ids of a node type.
    """

    name: str
    local: Tensor  # (n, ...); loading writes into it.  A scalar counts as one row
    first: int = 0  # number of its first row in the whole tensor
    is_replica: bool = False  # another rank writes these rows


def world_size() -> int:
    """Return the number of ranks, which is 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rows_by_rank(count: int, ranks: int) -> list[range]:
    """Split rows as TorchRec and torch.chunk do: ceil(count / ranks) each, the last ones less."""
    size = -(-count // ranks)
    starts = [min(rank * size, count) for rank in range(ranks + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def reduced(values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a tensor over the ranks, in place, and return it.  Collective."""
    if world_size() > 1:
        dist.all_reduce(values, op)
    return values


def gathered(values: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, of one shape, in order of rank.  Collective."""
    if world_size() == 1:
        return [values]
    parts = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(parts, values)
    return parts


class RankLost(KGEError, RuntimeError):
    """Another rank never started, died, or did not answer in time."""


class OtherRankFailed(KGEError, RuntimeError):
    """Work failed on another rank.  The message contains its error."""

    on_every_rank = True


def on_first_rank(processes: Processes, work: Callable[[], T]) -> T:
    """Run ``work()`` on rank 0; return its result or raise its error on all ranks.  Collective."""
    result: T | None = None
    error: Exception | None = None
    if processes.is_first:
        try:
            result = work()
        except Exception as caught:
            error = raised_alike(caught)
    if processes.world_size > 1:
        result, remote_error = processes.broadcast((result, _sendable(error)))
        error = error or remote_error
    if error is not None:
        raise error
    return cast(T, result)


def on_all_ranks(processes: Processes, work: Callable[[], T]) -> T:
    """Run ``work()`` on every rank; return this rank's result if all succeed.  Collective.

    A rank that fails raises its own error, the others OtherRankFailed.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    (any_failed,) = processes.largest([error is not None])  # a number is sent faster than messages
    if any_failed:
        messages = processes.gather(None if error is None else f"{error}" or type(error).__name__)
        if error is not None:
            raise raised_alike(error)
        rank, message = next((n, text) for n, text in enumerate(messages) if text is not None)
        raise OtherRankFailed(f"rank {rank}: {message}")
    return cast(T, result)


def _sendable(error: Exception | None) -> Exception | None:
    """Return the error, or a RuntimeError with the same message if it cannot be pickled."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return raised_alike(RuntimeError(f"{type(error).__name__}: {error}"))


_users, _made_here = 0, False  # of the group that ``processes`` made
_groups = 0  # so far, the same number on every rank


@contextmanager
def processes(device: str = "auto", timeout: float = Config.timeout) -> Iterator[Processes]:
    """Join the process group that torchrun describes, or make a group of one without torchrun.

    An existing group is used with its own timeout and is not destroyed.  A group made here is
    destroyed after its last user leaves, because several runs may be open at once.

    Args:
        device: "auto", "cpu" or "cuda".
        timeout: Seconds to wait for another rank, when joining and in each collective.

    Raises:
        ConfigError: The device is "cuda" and there is no CUDA device, or this rank has no GPU.
        RankLost: A rank goes missing inside the context.
    """
    global _users, _made_here, _groups
    where = _device(device, int(os.environ.get("LOCAL_RANK", 0)))
    try:
        if not dist.is_initialized():
            _start(where, timeout)
            _made_here = True
            _groups += 1
        _users += 1
        try:
            world = dist.get_world_size()
            local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
            yield Processes(dist.get_rank(), world, local, where, timeout)
        finally:
            _users -= 1
            if _users == 0 and _made_here:
                _made_here = False
                if dist.is_initialized():
                    dist.destroy_process_group()
    except RuntimeError as error:
        if is_lost_connection(error):
            raise RankLost(_explained(error, timeout)) from error
        raise


# Messages of gloo, NCCL and the rendezvous store if a rank is gone.
_TIMED_OUT = r"timed out waiting|wait timeout|timed out after"
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|remote process exited"
    rf"|ncclremoteerror|{_TIMED_OUT}|failed to (recv|send)|no route to host|connectfullmesh failed",
    re.IGNORECASE,
)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank is gone."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return type(error) in (RuntimeError, dist.DistBackendError) and bool(_LOST.search(str(error)))


def _explained(error: BaseException, timeout: float | None) -> str:
    """Say what has happened to another rank, and what to do; None: more time would not help."""
    resume = "`train --resume` continues from the last checkpoint, on any number of ranks."
    if timeout is not None and re.search(_TIMED_OUT, str(error), re.IGNORECASE):
        return (
            f"another rank did not answer within {timeout:g} s: that rank is stuck, cannot be "
            f"reached, or needs more time; for the latter set `timeout` (in seconds). {resume}"
        )
    return (
        "another rank died or cannot be reached: the first message of the other ranks says why "
        f"(no message: that rank was killed, often for memory). {resume}"
    )


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device; use cpu or auto")
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


def _start(device: torch.device, timeout: float) -> None:
    """Make the group of all ranks; RankLost if one does not start or goes missing."""
    # CUDA runs also need gloo, for checkpoints and small objects on the CPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        own = dist.HashStore()  # in memory: needs no port, host name or file
        dist.init_process_group(backend, store=own, rank=0, world_size=1)
        return
    limit = timedelta(seconds=timeout)
    shared, rank, world = _store(limit)
    # The store outlives groups, and attempts of torchrun (pytorch issue 135712): without a prefix,
    # a group would find the addresses of an older one, or of killed processes.  Each host counts
    # its own restarts, so the count is not used with several hosts.
    on_one_host = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0) if on_one_host else 0
    store = dist.PrefixStore(f"attempt-{attempt}-group-{_groups}", shared)
    _check_in(store, rank, world, timeout)
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


def _store(limit: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of all ranks, this rank and the number of ranks."""
    address, port = (os.environ.get(f"MASTER_{name}") for name in ("ADDR", "PORT"))
    if address is None or port is None:
        raise ConfigError(
            "RANK and WORLD_SIZE are set, and MASTER_ADDR or MASTER_PORT is not: start all ranks "
            f"by torchrun, or {_ALONE}"
        )
    rank, ranks = (os.environ[name] for name in ("RANK", "WORLD_SIZE"))
    log.info("rank %s of %s joins the other ranks at %s:%s", rank, ranks, address, port)
    try:
        return next(dist.rendezvous("env://", timeout=limit))
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"port {port} of {address} is in use by another program; name a free one by "
                f"MASTER_PORT (torchrun: --master_port), or {_ALONE}"
            ) from error
        raise RankLost(
            f"not all {ranks} ranks connected to {address}:{port} within "
            f"{limit.total_seconds():g} s (`timeout`): {str(error).splitlines()[0]}; to train in "
            f"one process, {_ALONE}"
        ) from error


def _check_in(store: dist.Store, rank: int, world: int, timeout: float) -> None:
    """Wait until every rank has started; RankLost if one does not within the timeout.

    It polls the store instead of blocking in it, so that Ctrl-C works.
    """
    store.set(f"rank-{rank}", "started")
    keys = [f"rank-{other}" for other in range(world)]
    deadline, pause = time.monotonic() + timeout, 0.005
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            raise RankLost(
                f"rank {', '.join(missing)} of {world} did not start within {timeout:g} s "
                "(`timeout`): see the messages of that rank or of the program that starts the "
                f"ranks; to train in one process, {_ALONE}"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
