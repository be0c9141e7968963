"""Batches of training: what they contain, and the loop over an epoch that makes them.

Batches are a function of the plan, the epoch and the step, never of the world size; each rank makes
its own share.

Shapes: M ids, U distinct ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import SIDES, Side
from kge_torchrec.data.features import Features
from kge_torchrec.data.negatives import NegativeSampler
from kge_torchrec.data.shuffle import EpochShuffle
from kge_torchrec.data.streams import Item, Result, in_order
from kge_torchrec.kernels.operators import distinct

B = TypeVar("B", bound="Pipelineable")
Order = Callable[[np.ndarray], np.ndarray]  # (M,) positions of an epoch -> (M,) examples


@dataclass
class Pipelineable:
    """A dataclass whose tensors (and jagged tensors) move together; other fields stay.

    TorchRec's pipeline takes it for one of its own, see `embeddings.torchrec`.
    """

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


@dataclass
class Bags(Pipelineable):
    """The features of the entities of a batch."""

    own: Tensor  # (U, 1) float32, 1 where an entity's own row counts, otherwise 0
    place: Tensor  # (M,) the entity of each pair, a position in the batch's entities
    row: Tensor  # (M,) the feature of each pair, a position in the rows looked up
    weight: Tensor  # (M, 1) float32

    def composed(self, rows: Tensor) -> Tensor:
        """Return the vectors of entities (U, D) from the rows of entities, then features."""
        own = rows[: len(self.own)] * self.own
        return own.index_add(0, self.place, (rows[self.row] * self.weight).to(own.dtype))


@dataclass
class SampledBatch(Pipelineable):
    """One rank's share of a step for which the rows of some entities are looked up.

    ``ids`` are the U distinct entities, ascending, and behind them their features, in the form that
    the engine looks up (``Delivery.feature``).  Not deduplicated, they are the M entities.
    """

    ids: Any
    entities: Tensor  # (M,) the entities of the batch, as positions in ids; or themselves
    deduplicated: bool
    bags: Bags | None


@dataclass(frozen=True)
class BatchPlan:
    """The content of the batches of an epoch, for any maker of batches.

    Args:
        batch_size: Examples (triples or queries) per step over all ranks.
        sampler: None where the candidates are all entities.
        counts: By side, random numbers per chunk, each of which becomes a candidate.
        chunk_size: Triples that share their candidates; 0: those of a step.
        log_q: Whether batches say how often a chunk is expected to have each candidate.
        accumulation: Micro-batches per step and rank, whose gradients sum to that of the step.
        max_answers: Answers of a query per step where candidates are sampled for queries.  Of a
            query with more, each epoch samples this many; the others are not candidates.  0: all.
    """

    batch_size: int
    seed: int = 0
    sides: tuple[Side, ...] = SIDES
    sampler: NegativeSampler | None = None
    counts: Mapping[Side, int] = field(default_factory=dict)
    chunk_size: int = 0
    log_q: bool = False
    accumulation: int = 1
    max_answers: int = 0
    features: Features | None = None


@dataclass(frozen=True)
class Delivery:
    """The share of the batches that this process makes, and their form.

    Args:
        ahead: Make a few batches ahead in threads, in pinned memory where there is CUDA.  A GPU
            would wait otherwise.
        feature: Makes the input of the engine's lookup of the ids (M,) to look up.
        deduplicate: Look each entity of a batch up once.  False looks it up for every place, as a
            CUDA graph needs, whose sizes are fixed.
    """

    rank: int = 0
    world_size: int = 1
    ahead: bool = False
    feature: Callable[[Tensor], Any] = lambda ids: ids
    deduplicate: bool = True


def lookup_of(
    entities: Tensor, features: Features | None = None, delivery: Delivery | None = None
) -> dict[str, Any]:
    """Return the fields of a ``SampledBatch`` with these entities (M,), as ``delivery`` says."""
    delivery, bags = delivery or Delivery(), None
    ids, places = entities, entities
    if delivery.deduplicate:
        ids, places = distinct(entities)
    if features is not None:
        place, tags, weight = features.of_entities(ids)
        row = torch.arange(len(tags), device=tags.device)
        if delivery.deduplicate:
            tags, row = distinct(tags)
        own = features.own[ids].float()[:, None]
        bags = Bags(own, place, row + len(ids), weight[:, None])
        ids = torch.cat([ids, tags + len(features.own)])
    fields = {"ids": delivery.feature(ids), "entities": places, "bags": bags}
    return {**fields, "deduplicated": delivery.deduplicate}


class EpochBatches(Generic[B]):
    """One rank's batches; subclasses make the ``batch`` of a step."""

    def __init__(
        self,
        examples: int,
        plan: BatchPlan,
        delivery: Delivery | None = None,
        device: torch.device | None = None,
    ):
        self.examples, self.plan, self.delivery = examples, plan, delivery or Delivery()
        self.device = device or torch.device("cpu")

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> B:
        """Return the batch of a step, or micro-batch ``part`` of it; it may be empty."""
        raise NotImplementedError

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch: which example comes at which position."""
        return EpochShuffle(self.examples, self.plan.seed, epoch)

    @cached_property  # every step reads it
    def steps_per_epoch(self) -> int:
        """Steps per epoch, the same on every rank; the last one may be smaller."""
        return -(-self.examples // self.plan.batch_size)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[B]:
        """Iterate over this rank's micro-batches of an epoch, from ``first_step`` on."""
        order, count = self.order(epoch), self.plan.accumulation
        parts = range(first_step * count, self.steps_per_epoch * count)
        on_cpu = self.device.type == "cpu"
        if on_cpu and not self.delivery.ahead:
            for part in parts:
                yield self.batch(order, epoch, *divmod(part, count))
            return

        def make(part: int) -> B:
            batch = self.batch(order, epoch, *divmod(part, count))
            return batch.pin_memory() if on_cpu and torch.cuda.is_available() else batch

        yield from prefetched(make, parts) if on_cpu else made_on_stream(self.device, make, parts)

    def positions(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the first position of a step in its epoch, and the number of its examples."""
        first = step * self.plan.batch_size
        return first, min(self.plan.batch_size, self.examples - first)


def mean_weight(weights: np.ndarray | None) -> float:
    """Return the mean of the weights of all training triples, 1 without weights.

    A loss divides weights by it: by the mean of its batch, a light triple would count more.
    """
    return 1.0 if weights is None else float(weights.mean(dtype=np.float64))


# A GPU trains a batch in the time that several cores take to make one.
BATCH_WORKERS = 8


def prefetched(make: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``map(make, items)``, made ahead by at most 8 workers that share torch's threads.

    Otherwise each worker would start as many threads as there are cores.
    """
    threads = torch.get_num_threads()
    workers = max(1, min(BATCH_WORKERS, threads))
    together = threading.Barrier(workers)

    def take_share() -> None:
        torch.get_num_threads()  # a thread takes up the common number when it first needs one
        torch.set_num_threads(max(1, threads // workers))

    with ThreadPoolExecutor(workers, initializer=take_share) as pool:
        try:
            # Each task waits for a worker of its own, so that all have started.
            wait([pool.submit(together.wait) for _ in range(workers)])
        except BaseException:
            together.abort()
            raise
        finally:
            torch.set_num_threads(threads)  # also holds for MKL and for later threads
        yield from in_order(pool, workers, make, items)


AHEAD = 2  # batches that a GPU makes while it trains on an earlier one


def made_on_stream(
    device: torch.device, make: Callable[[Item], B], items: Iterable[Item]
) -> Iterator[B]:
    """Yield ``map(make, items)``, made ahead on a CUDA device by a thread with its own stream.

    The number of distinct ids has to be read from the device, and training shall not wait for it.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the triples are there

    def make_there(item: Item) -> tuple[B, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return make(item), stream.record_event()

    with ThreadPoolExecutor(1) as pool:
        for batch, made in in_order(pool, AHEAD, make_there, items):
            current = torch.cuda.current_stream(device)
            current.wait_event(made)
            batch.record_stream(current)
            yield batch
