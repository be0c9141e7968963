"""A process group for ranks on one host that exchanges data through shared memory.

all_to_all_single and all_reduce use ``Mailboxes``; gloo handles all other collectives.  With gloo's
sockets, a step spends more time waiting than copying: a waiting rank sleeps, and its core wakes
late, several times per step.

    SharedMemoryGroup   the group, for torch.distributed, TorchRec and DistributedDataParallel
    with_exchange       adds the group to ``Processes``
    CollectiveWatch     a dispatch mode that sees all collectives, for counting them

PyTorch 2.13 calls a group's ``all_to_all_single``, and 2.11 its ``alltoall_base``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.mailboxes import Mailboxes
from kge_torchrec.distributed.processes import Processes

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

NAME = "shared_memory"
# all_reduce up to this size takes one exchange, in which every rank sums everything.  Larger
# tensors take two: every rank sums its part, then the ranks exchange the sums.
_MAX_SUM_AT_ONCE = 1 << 20  # bytes
_REDUCED: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    dist.ReduceOp.SUM: lambda total, term: total.add_(term),
    dist.ReduceOp.MAX: lambda total, term: torch.maximum(total, term, out=total),
    dist.ReduceOp.MIN: lambda total, term: torch.minimum(total, term, out=total),
}
_SUMMED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32
)  # fmt: skip


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group of ranks on one host.

    A collective writes its message at once.  The messages of others are read when a caller waits
    for this collective or for a later one.  Reading follows the order of the calls, which is the
    same on every rank.

    Args:
        boxes: The mailboxes of all ranks.
        gloo: The gloo backend of all ranks, for the other collectives.
    """

    is_watched = False  # see ``CollectiveWatch``

    def __init__(self, boxes: Mailboxes, gloo: Any) -> None:
        super().__init__(boxes.rank, boxes.size)  # type: ignore[call-arg]  # not in the stubs
        self._boxes, self._gloo = boxes, gloo  # Any: torch's stubs lack gloo's collectives
        self._under_way = deque[_Exchange]()
        self._lock = threading.RLock()
        # torch keeps the name of a group in its backend, so that two groups must not share one:
        # FSDP looks the group of all ranks up by its name.  This backend serves no other purpose.
        named = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=1))
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, named)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Exchange rows, see ``torch.distributed.all_to_all_single``.

        Raises:
            ValueError: The sizes do not fit the tensors.
        """
        opts = opts or dist.AllToAllOptions()
        if self.is_watched:
            arguments = output, input, list(output_split_sizes), list(input_split_sizes)
            return dist.all_to_all_single(*arguments, async_op=True)
        if not (_is_plain(output) and _is_plain(input)):
            sizes = list(output_split_sizes), list(input_split_sizes)
            return self._gloo.alltoall_base(output, input, *sizes, opts)
        own = self._boxes.rank
        sent = _split(_bytes(input.contiguous()), len(input), input_split_sizes, self.size())
        arrived = output if output.is_contiguous() else torch.empty_like(output).contiguous()
        places = _split(_bytes(arrived), len(output), output_split_sizes, self.size())
        if len(sent[own]) != len(places[own]):
            raise ValueError(f"{len(sent[own])} bytes to itself, {len(places[own])} from itself")

        places[own][:] = sent[own]

        def receive(parts: list[np.ndarray]) -> None:
            for source, (place, part) in enumerate(zip(places, parts, strict=True)):
                if source != own:
                    _check(len(part), len(place), source)
                    place[:] = part
            if arrived is not output:
                output.copy_(arrived)

        parts = [_NOTHING if rank == own else part for rank, part in enumerate(sent)]
        return self._start(parts, receive, [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # overloaded there

    def allreduce(  # type: ignore[override]  # overloaded there
        self, tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce over the ranks, see ``torch.distributed.all_reduce``.

        Terms are added in order of rank, so sums are bitwise equal on all ranks.
        """
        opts = opts or dist.AllreduceOptions()
        if self.is_watched and len(tensors) == 1:
            return dist.all_reduce(tensors[0], opts.reduceOp, async_op=True)
        reduce = _REDUCED.get(opts.reduceOp.op)
        if reduce is None or len(tensors) != 1 or tensors[0].dtype not in _SUMMED:
            return self._gloo.allreduce(tensors, opts)
        (total,) = tensors
        if not (_is_plain(total) and total.is_contiguous()):
            return self._gloo.allreduce(tensors, opts)
        flat = total.detach().view(-1)
        if self.size() > 2 and flat.nbytes > _MAX_SUM_AT_ONCE:
            return self._reduce_in_parts(flat, reduce, tensors)

        def receive(parts: list[np.ndarray]) -> None:
            _reduce_into(flat, parts, reduce)

        return self._start([_bytes(flat)] * self.size(), receive, tensors)

    def _reduce_in_parts(
        self, flat: Tensor, reduce: Callable[[Tensor, Tensor], Any], result: list[Tensor]
    ) -> dist.Work:
        """Reduce in two exchanges: each rank sums its part, then sends it to all.

        Waits for the first exchange.
        """
        bounds = [len(flat) * rank // self.size() for rank in range(self.size() + 1)]
        parts = [flat[start:stop] for start, stop in pairwise(bounds)]
        mine = torch.empty_like(parts[self._boxes.rank])

        def sum_mine(terms: list[np.ndarray]) -> None:
            _reduce_into(mine, terms, reduce)

        def gather(sums: list[np.ndarray]) -> None:
            for rank, (part, values) in enumerate(zip(parts, sums, strict=True)):
                _check(len(values), part.nbytes, rank)
                _bytes(part)[:] = values

        self._start([_bytes(part) for part in parts], sum_mine, []).wait()
        return self._start([_bytes(mine)] * self.size(), gather, result)

    def all_gather_single(  # type: ignore[override]  # overloaded there
        self, output: Tensor, input: Tensor, opts: Any
    ) -> dist.Work:
        """Gather with gloo, see ``torch.distributed.all_gather_into_tensor``."""
        return self._gloo._allgather_base(output, input, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        """Reduce and scatter with gloo, see ``torch.distributed.reduce_scatter_tensor``."""
        return self._gloo._reduce_scatter_base(output, input, opts)

    def getBackendName(self) -> str:
        """Return the name of this backend."""
        return NAME

    def shutdown(self) -> None:
        """Close the mailboxes, which also ends the wait of other ranks for this one."""
        self._boxes.close()  # gloo stays open: it belongs to the group of all ranks

    # Running exchanges

    def _start(
        self,
        parts: list[np.ndarray],
        receive: Callable[[list[np.ndarray]], None],
        result: list[Tensor],
    ) -> _Exchange:
        with self._lock:
            number = self._boxes.leave(parts, self._receive_ready)
            exchange = _Exchange(self, number, receive, result)
            self._under_way.append(exchange)
        return exchange

    def _receive_ready(self) -> None:
        """Read the exchanges that every rank has written."""
        while self._under_way and self._boxes.is_there(self._under_way[0].number):
            self._receive_next()

    def receive_until(self, exchange: _Exchange) -> None:
        """Read running exchanges in order, up to this one."""
        with self._lock:
            while not exchange.done:
                self._receive_next()

    def _receive_next(self) -> None:
        exchange = self._under_way[0]
        parts = [self._boxes.part(exchange.number, rank) for rank in range(self.size())]
        self._under_way.popleft()
        try:
            exchange.receive(parts)
        except ValueError as error:
            exchange.error = error
        self._boxes.consumed(exchange.number)
        exchange.done = True


class _Exchange(dist.Work):
    """A running collective: the work that a caller waits for."""

    def __init__(
        self,
        group: SharedMemoryGroup,
        number: int,
        receive: Callable[[list[np.ndarray]], None],
        result: list[Tensor],
    ) -> None:
        super().__init__()
        self._group, self._result = group, result
        self.number, self.receive = number, receive
        self.done = False
        self.error: ValueError | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensors hold the result.  The group's timeout applies."""
        if not self.done:
            self._group.receive_until(self)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Wait, then return a finished future, as DistributedDataParallel needs."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


# Forward every other collective to gloo from Python.  Forwarding from C++ can deadlock: C++ would
# hold the GIL while it waits for gloo's lock, and a gloo thread may hold that lock while it waits
# for the GIL to free a tensor.
_BY_GLOO = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced",
    "allreduce_coalesced", "alltoall", "barrier", "broadcast", "gather", "monitored_barrier",
    "recv", "recv_anysource", "reduce", "reduce_scatter", "scatter", "send",
    # PyTorch 2.14 and later
    "all_gather_single_coalesced", "gather_into_tensor", "gather_single",
    "reduce_scatter_single_coalesced",
)  # fmt: skip


def _forwarded_to_gloo(name: str) -> Callable[..., Any]:
    def call(self: SharedMemoryGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._gloo, name)(*args, **kwargs)

    call.__name__ = name
    return call


for _name in _BY_GLOO:
    setattr(SharedMemoryGroup, _name, _forwarded_to_gloo(_name))

_NOTHING = np.empty(0, np.uint8)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def _bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a contiguous tensor as a view.

    A tensor with one element counts as contiguous with any stride, such as 0 after ``expand``.
    ``view`` to another dtype rejects such strides, so the stride is set to 1 first.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def _split(data: np.ndarray, rows: int, sizes: Sequence[int], count: int) -> list[np.ndarray]:
    """Split the bytes of ``rows`` rows into ``count`` runs of ``sizes`` rows.

    Without sizes all runs are equal.
    """
    if not sizes:
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows:
        raise ValueError(f"{rows} rows cannot be split by {list(sizes)} for {count} ranks")
    bounds = np.cumsum([0, *sizes]) * (len(data) // max(rows, 1))
    return [data[start:stop] for start, stop in pairwise(bounds.tolist())]


def _reduce_into(total: Tensor, parts: list[np.ndarray], reduce: Callable[..., Any]) -> None:
    for rank, part in enumerate(parts):
        _check(len(part), total.nbytes, rank)
        term = torch.from_numpy(part).view(total.dtype)
        if rank == 0:
            total.copy_(term)
        else:
            reduce(total, term)


def _check(arrived: int, expected: int, source: int) -> None:
    if arrived != expected:
        raise ValueError(f"rank {source} sent {arrived} bytes where {expected} were expected")


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SharedMemoryGroup:
    """Make the group with collectives instead of the store.

    A collective fails at once if a rank dies; the store would wait for its timeout.
    """
    world = dist.group.WORLD
    assert world is not None  # torch makes new groups only within the group of all ranks

    def exchange(text: str) -> list[str]:
        texts = [text] * size
        dist.all_gather_object(texts, text)
        return texts

    boxes = Mailboxes(rank, size, exchange, timeout.total_seconds())
    return SharedMemoryGroup(boxes, world._get_backend(torch.device("cpu")))


class CollectiveWatch(TorchDispatchMode):
    """A dispatch mode that sees the tensors of every collective.

    Within the block, collectives of SharedMemoryGroup run as torch operators on the group of all
    ranks, with the same tensors.  Collective: all ranks enter and leave the block between the same
    two collectives.
    """

    @staticmethod
    def watching() -> bool:
        """Return whether a block is entered: then all ranks call the collectives of torch."""
        return SharedMemoryGroup.is_watched

    def __enter__(self) -> Self:
        SharedMemoryGroup.is_watched = True
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        SharedMemoryGroup.is_watched = False
        super().__exit__(*error)


dist.Backend.register_backend(NAME, _create, devices=["cpu"])

# Shared-memory groups (None: impossible) by group of all ranks, dropped together with it.
_made: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()


def with_exchange(processes: Processes, transport: str) -> Processes:
    """Return ``processes`` with the group that exchanges rows and gradients.  Collective.

    Args:
        processes: The ranks of the run.
        transport: "gloo", "shared_memory", or "auto" (shared memory if possible, else gloo).

    Raises:
        ConfigError: The transport is "shared_memory" and the ranks cannot share memory.
    """
    if transport == "gloo" or processes.world_size == 1:
        return processes
    if processes.group not in _made:
        _made[processes.group] = _shared_memory_group(processes)
    exchange_group = _made[processes.group]
    if exchange_group is None and transport == "shared_memory":
        raise ConfigError(
            "transport shared_memory: the ranks do not share memory (CUDA, several hosts or "
            "containers, or no Linux); use auto or gloo"
        )
    return replace(processes, exchange_group=exchange_group)


def _shared_memory_group(processes: Processes) -> dist.ProcessGroup | None:
    """Return a SharedMemoryGroup, or None on every rank if the ranks cannot share memory."""
    if processes.device.type != "cpu":
        return None
    try:
        return dist.new_group(backend=NAME, timeout=timedelta(seconds=processes.timeout))
    except OSError as error:
        log.info("ranks exchange rows with gloo: %s", error)
        return None
