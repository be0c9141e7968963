"""Batches of training: what they contain, and the loop over an epoch that makes them.

A ``BatchPlan`` says what the batches contain.  `triples` makes those of triples, on a CPU or on the
device that trains; `queries` makes those of queries, on a CPU.  Batches are a function of the plan,
the epoch and the step, never of the world size; each rank makes its own share.

Shapes: M ids, U distinct ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import SIDES, Side
from kge_torchrec.data.batches.order import EpochShuffle, Order
from kge_torchrec.data.features import Features
from kge_torchrec.data.negatives import NegativeSampler
from kge_torchrec.data.store.filter_index import FilterIndex
from kge_torchrec.data.streams import Item, Result, in_order
from kge_torchrec.kernels.distinct import distinct

B = TypeVar("B", bound="Pipelineable")


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
    """The features of the entities of a batch.

    Args:
        own: (U, 1) float32, 1 where an entity's own row counts, otherwise 0.
        place: (M,) the entity of each pair, a position in the batch's entities.
        row: (M,) the feature of each pair, a position in the rows looked up.
        weight: (M, 1) float32.
    """

    own: Tensor
    place: Tensor
    row: Tensor
    weight: Tensor

    @classmethod
    def of(
        cls, features: Features | None, entities: Tensor, deduplicate: bool = True
    ) -> tuple[Tensor, Bags | None]:
        """Return the ids to look up for entities (U,), and their bags.

        Args:
            features: Those of all entities, if they have any.
            entities: Ids in any order, on the device of the features.
            deduplicate: Whether to look each feature up once, not for each of its pairs.
        """
        if features is None:
            return entities, None
        place, tags, weight = features.of_entities(entities)
        row = torch.arange(len(tags), device=tags.device)
        if deduplicate:
            tags, row = distinct(tags)
        ids = torch.cat([entities, tags + len(features.own)])
        own = features.own[entities].float()[:, None]
        return ids, cls(own, place, row + len(entities), weight[:, None])

    def composed(self, rows: Tensor) -> Tensor:
        """Return the vectors of entities (U, D) from the rows of entities, then features."""
        own = rows[: len(self.own)] * self.own
        return own.index_add(0, self.place, (rows[self.row] * self.weight).to(own.dtype))


@dataclass
class SampledBatch(Pipelineable):
    """One rank's share of a step for which the rows of some entities are looked up.

    Args:
        ids: The U distinct entity ids, ascending, and behind them the ids of their features; in the
            form that the engine looks up (``Delivery.feature``).
        entities: (M,) the entities of the batch, as positions in ids.
        deduplicated: False: ids holds the M entities themselves, with duplicates, and so does
            ``entities``.
        bags: The features of the entities, if they have any.
    """

    ids: Any
    entities: Tensor
    deduplicated: bool
    bags: Bags | None


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
    features: Features | None = None


@dataclass(frozen=True)
class Delivery:
    """The share of the batches that this process makes, and their form.

    Args:
        rank, world_size: The share.
        ahead: Make a few batches ahead in threads, in pinned memory where there is CUDA.  A GPU
            would wait otherwise.
        feature: Makes the input of the engine's lookup of the ids (M,) to look up.
        deduplicate: Look each entity of a batch up once.  False looks it up for every place, which
            costs more traffic and is there to be measured.
    """

    rank: int = 0
    world_size: int = 1
    ahead: bool = False
    feature: Callable[[Tensor], Any] = lambda ids: ids
    deduplicate: bool = True


def lookup_of(entities: Tensor, features: Features | None, delivery: Delivery) -> dict[str, Any]:
    """Return the fields of a ``SampledBatch`` with these entities (M,)."""
    deduplicate = delivery.deduplicate
    unique, places = distinct(entities) if deduplicate else (entities, entities)
    ids, bags = Bags.of(features, unique, deduplicate)
    fields = {"ids": delivery.feature(ids), "entities": places}
    return {**fields, "deduplicated": deduplicate, "bags": bags}


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
