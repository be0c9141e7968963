"""Batches of training: what they contain, the loop over an epoch that makes them, and their lookup.

A ``BatchPlan`` says what the batches contain.  Who makes them is exchangeable: `triples` and
`queries` make them with numpy on the CPU.  Batches are a function of the plan, the epoch and the
step, never of the world size; each rank makes its own share.

The input of an embedding lookup is the distinct ids of a batch, in TorchRec's jagged tensors.
TorchRec has no wheels for macOS and Windows.  Where it is missing, stand-ins take the place of its
tensors: the hand-rolled engine needs nothing of them but the values, so it trains there as well.

Shapes: M ids, U distinct ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import ENTITY, SIDES, Side
from kge_torchrec.data.batches.order import (
    EpochShuffle,
    Order,
)
from kge_torchrec.data.negatives import NegativeSampler
from kge_torchrec.data.store.filter_index import FilterIndex
from kge_torchrec.data.streams import Item, Result, in_order
from kge_torchrec.kernels.jit import helper, kernel

try:
    from torchrec import JaggedTensor as JaggedTensor
    from torchrec import KeyedJaggedTensor as KeyedJaggedTensor
    from torchrec.streamable import Pipelineable as _Pipelineable
except ImportError:

    class _Pipelineable:  # type: ignore[no-redef]
        """Stand-in for TorchRec's base class of batches."""

    class JaggedTensor:  # type: ignore[no-redef]
        """Stand-in: values (M, ...) of one feature."""

        def __init__(self, values: Tensor, lengths: Tensor | None = None, **_: Any):
            self._values = values

        def values(self) -> Tensor:
            return self._values

    class KeyedJaggedTensor(JaggedTensor):  # type: ignore[no-redef]
        """Stand-in: values (M,) under one key."""

        def __init__(self, keys: list[str], values: Tensor, lengths: Tensor, **_: Any):
            super().__init__(values)

        def to(self, device: Any, non_blocking: bool = False) -> KeyedJaggedTensor:
            return self._with(self._values.to(device=device, non_blocking=non_blocking))

        def pin_memory(self) -> KeyedJaggedTensor:
            return self._with(self._values.pin_memory())

        def record_stream(self, stream: Any) -> None:
            self._values.record_stream(stream)

        def _with(self, values: Tensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor([], values, values)


B = TypeVar("B", bound="Pipelineable")


@dataclass
class Pipelineable(_Pipelineable):
    """A dataclass whose tensors (and jagged tensors) move together; other fields stay."""

    def _each(self, method: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Call a method of every tensor and return the results by field."""
        return {
            name: getattr(value, method)(*arguments, **options)
            for name, value in vars(self).items()
            if hasattr(value, "record_stream")
        }

    def to(self: B, device: torch.device, non_blocking: bool = False) -> B:
        return replace(self, **self._each("to", device=device, non_blocking=non_blocking))

    def pin_memory(self: B) -> B:
        return replace(self, **self._each("pin_memory"))

    def record_stream(self, stream: Any) -> None:
        self._each("record_stream", stream)  # torch and TorchRec give it different names


@dataclass(frozen=True)
class Candidates:
    """The sampled candidates that a query is compared with.

    Args:
        sampler: Makes the candidates.
        count: Random numbers per chunk and side, each of which becomes a candidate.
        head_count: The same for the head side; None takes ``count``.
        chunk_size: Triples that share their candidates: 1 gives each its own, 0 shares them over
            the whole batch.
        known: Facts that are never negatives, or None.
        log_q: Whether batches say how often a chunk is expected to have each candidate.
    """

    sampler: NegativeSampler
    count: int
    head_count: int | None = None
    chunk_size: int = 0
    known: FilterIndex | None = None
    log_q: bool = False

    def numbers(self, side: Side) -> int:
        """Return the random numbers per chunk of a side."""
        return self.count if side == "tail" or self.head_count is None else self.head_count


@dataclass(frozen=True)
class BatchPlan:
    """The content of the batches of an epoch, for any maker of batches.

    Args:
        batch_size: Examples (triples or queries) per step over all ranks.
        seed: Seed of the order, the candidates and the answers.
        sides: The sides that are queried.
        candidates: The sampled candidates; None where every entity is a candidate.
        accumulation: Micro-batches per step and rank.  Together they hold the examples, candidates
            and weights of the step in one piece, so their gradients sum to its gradient.
        max_answers: Answers of a query per step where candidates are sampled for queries.  Of a
            query with more, each epoch samples this many; the others are not candidates.  0: all.
        features: `Features` of the entities, whose rows are looked up with them; or None.
    """

    batch_size: int
    seed: int = 0
    sides: tuple[Side, ...] = SIDES
    candidates: Candidates | None = None
    accumulation: int = 1
    max_answers: int = 0
    features: Any = None


@dataclass(frozen=True)
class Delivery:
    """The share of the batches that this process makes, and their form.

    Args:
        rank, world_size: The share.
        ahead: Make a few batches ahead in threads, in pinned memory where there is CUDA.  A GPU
            would wait otherwise.
        bags: Bags per lookup, see `LOOKUP_BAGS`.
        deduplicate: Look each entity of a batch up once.  False looks it up for every place, which
            costs more traffic and is there to be measured.
    """

    rank: int = 0
    world_size: int = 1
    ahead: bool = False
    bags: int = 1
    deduplicate: bool = True


class EpochBatches(Generic[B]):
    """One rank's batches; subclasses make the ``batch`` of a step.

    Args:
        examples: Number of examples per epoch.
    """

    def __init__(self, examples: int, plan: BatchPlan, delivery: Delivery | None = None):
        self.examples, self.plan, self.delivery = examples, plan, delivery or Delivery()
        if examples == 0:
            raise ValueError("there are no training triples")

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> B:
        """Return the batch of a step, or micro-batch ``part`` of it; it may be empty."""
        raise NotImplementedError

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch: which example comes at which position."""
        return EpochShuffle(self.examples, self.plan.seed, epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch, the same on every rank; the last one may be smaller."""
        return -(-self.examples // self.plan.batch_size)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[B]:
        """Iterate over this rank's micro-batches of an epoch, from ``first_step`` on."""
        order, count = self.order(epoch), self.plan.accumulation
        parts = range(first_step * count, self.steps_per_epoch * count)
        if not self.delivery.ahead:
            for part in parts:
                yield self.batch(order, epoch, *divmod(part, count))
            return

        def make(part: int) -> B:
            batch = self.batch(order, epoch, *divmod(part, count))
            return batch.pin_memory() if torch.cuda.is_available() else batch

        yield from prefetched(make, parts)

    def positions(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the first position of a step in its epoch, and the number of its examples."""
        first = step * self.plan.batch_size
        return first, min(self.plan.batch_size, self.examples - first)

    def _part(self, part: int) -> tuple[int, int]:
        """Return which of how many equal parts of a step a micro-batch of this rank is."""
        count = self.plan.accumulation
        return self.delivery.rank * count + part, self.delivery.world_size * count


def mean_weight(weights: np.ndarray | None) -> float:
    """Return the mean of the weights of all training triples, 1 without weights.

    A loss divides weights by this mean and not by the mean of its batch.  Otherwise a triple would
    count more in a batch of light triples, and the more so the smaller the batch is.
    """
    return 1.0 if weights is None else float(weights.mean(dtype=np.float64))


# A GPU trains a batch in the time that several cores take to make one.
BATCH_WORKERS = 8


def prefetched(make: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``map(make, items)``, made ahead by at most 8 workers that share torch's threads."""
    workers = max(1, min(BATCH_WORKERS, torch.get_num_threads()))
    with _pool_of_shares(workers, torch.get_num_threads()) as pool:
        yield from in_order(pool, workers, make, items)


@contextmanager
def _pool_of_shares(workers: int, threads: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool whose workers have equal shares of the CPU threads.

    Otherwise each worker would start as many threads as there are cores.  ``set_num_threads`` holds
    for the calling thread, but also for threads that start later and for MKL, hence the order.
    """
    started = threading.Barrier(workers + 1)

    def take_share() -> None:
        torch.get_num_threads()  # a thread takes up the common number when it first needs one
        torch.set_num_threads(max(1, threads // workers))
        started.wait()

    with ThreadPoolExecutor(workers, initializer=take_share) as pool:
        try:
            for _ in range(workers):
                pool.submit(int)  # starts one worker, as the others wait for the last
            started.wait()
        except BaseException:
            started.abort()
            raise
        finally:
            torch.set_num_threads(threads)
        yield pool


# Bags per lookup, by device type.  The rows are the same with any number of bags, but FBGEMM's CUDA
# kernels give each bag one thread or one warp, so one bag would be walked by a single one.  The
# number is the same on all ranks and in all steps: otherwise TorchRec takes batches for batches of
# variable size and sends them in a slower way.
LOOKUP_BAGS = {"cpu": 1, "cuda": 4096}


def as_feature(ids: Tensor, bags: int = 1) -> KeyedJaggedTensor:
    """Return entity ids as the input of the lookup, spread evenly over bags.

    The rows come back as ``collection(...)[ENTITY].values()``, (M, D), in the order of the ids.

    Args:
        ids: (M,) int64; M may be 0.
        bags: Number of bags, see ``LOOKUP_BAGS``.
    """
    count = ids.numel()
    lengths, offsets = _evenly(count, bags, ids.device)
    return KeyedJaggedTensor(
        keys=[ENTITY],
        values=ids,
        lengths=lengths,
        offsets=offsets,
        stride=bags,
        # Otherwise TorchRec copies them from the device, and waits.
        length_per_key=[count],
        offset_per_key=[0, count],
    )


@lru_cache(maxsize=4)  # batches of one size have them in common; a GPU would start 5 kernels
def _evenly(count: int, bags: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lengths (bags,) and offsets (bags + 1,) of bags that share ``count`` ids evenly."""
    lengths = torch.full((bags,), count // bags, dtype=torch.int64, device=device)
    lengths[: count % bags] += 1
    offsets = lengths.new_zeros(bags + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return lengths, offsets


_BITS = 8  # bits of an id that one pass sorts by; their counts fit the nearest cache
_VALUES = 1 << _BITS


@kernel
def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct ids in ascending order, and the place of each id among them.

    The result is that of ``np.unique(ids, return_inverse=True)``.  A radix sort finds it in two to
    four passes, as ids are whole numbers below the number of entities.

    Args:
        ids: (M,) int64, none negative (not checked); M may be 0.

    Returns:
        The distinct ids (U,) and the places (M,), both int64.
    """
    places = _sorted_places(ids)
    unique, inverse = np.empty_like(ids), np.empty_like(ids)
    count, last = 0, np.int64(-1)
    for place in places:
        count += ids[place] != last  # no branch, since no processor could predict it
        last = ids[place]
        unique[count - 1] = last
        inverse[place] = count - 1
    return unique[:count].copy(), inverse


@helper
def _sorted_places(ids: np.ndarray) -> np.ndarray:
    """Return the places (M,) of the ids in ascending order; equal ids keep their order."""
    largest = np.int64(0)
    for number in ids:
        largest = max(largest, number)
    places, other = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    for i in range(len(ids)):  # np.arange takes a fifth of a second to compile
        places[i] = i
    shift = 0
    while shift < 64 and largest >> shift:
        starts = np.zeros(_VALUES + 1, np.int64)
        for number in ids:
            starts[((number >> shift) & (_VALUES - 1)) + 1] += 1
        for value in range(_VALUES):
            starts[value + 1] += starts[value]
        for place in places:
            value = (ids[place] >> shift) & (_VALUES - 1)
            other[starts[value]] = place
            starts[value] += 1
        places, other = other, places
        shift += _BITS
    return places
