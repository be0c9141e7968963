"""Batches: this rank's share of every global batch, with its negatives, ready for the lookup.

A global batch is a run of positions of the epoch's order, which is a function of (seed, epoch);
rank r takes the r-th part of it.  Triples are grouped into chunks that share negatives; chunks are
cut at fixed positions of the global batch, so what is trained does not depend on the world size.
A batch moves between host and device as TorchRec's pipeline asks for it (``Pipelineable``).

Shapes: C chunks, b triples a chunk, K candidates a chunk of a side, U unique entities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import ENTITY, SIDES, Side, jagged
from kge_torchrec.data.batches.distinct import distinct
from kge_torchrec.data.store.filter_index import Degrees, FilterIndex
from kge_torchrec.data.batches.jagged import KeyedJaggedTensor
from kge_torchrec.data.negatives import NegativeSampler
from kge_torchrec.data.prefetch import prefetched
from kge_torchrec.data.batches.order import EpochShuffle, ReplayShuffle, replayed_size
from kge_torchrec.data.typed_negatives import SuitedNegatives
from kge_torchrec.data.weighted_draw import Order, WeightedDraw
from kge_torchrec.data.weights import mean_of

B = TypeVar("B", bound="Pipelineable")


@dataclass
class Pipelineable(jagged.Pipelineable):
    """A dataclass whose tensors (and jagged tensors) move together; other fields stay."""

    def _map(self: B, change: Callable[[Any], Any]) -> B:
        return replace(self, **{name: change(getattr(self, name)) for name in self._tensors()})

    def _tensors(self) -> list[str]:
        names = (field.name for field in fields(self))
        return [name for name in names if hasattr(getattr(self, name), "record_stream")]

    def to(self: B, device: torch.device, non_blocking: bool = False) -> B:
        return self._map(lambda x: x.to(device=device, non_blocking=non_blocking))

    def pin_memory(self: B) -> B:
        return self._map(lambda x: x.pin_memory())

    def record_stream(self, stream: Any) -> None:
        for name in self._tensors():
            getattr(self, name).record_stream(stream)


class EpochBatches(Generic[B]):
    """One rank's batches; subclasses say how many ``examples`` there are and build a ``batch``.

    batch_size: examples a step over all ranks.
    ahead: build a few batches ahead in threads, in pinned memory where there is CUDA; for GPUs,
        which would wait otherwise.
    accumulation: micro-batches that a rank's share of a step comes in.
    replay: how many of ``every`` example are old, and the share of those in an epoch.
    draw: which examples an epoch passes through; None takes each once.
    """

    def __init__(
        self,
        batch_size: int,
        seed: int,
        ahead: bool,
        accumulation: int,
        replay: tuple[int, float] = (0, 1.0),
        draw: WeightedDraw | None = None,
    ):
        self.batch_size, self.seed, self.draw = batch_size, seed, draw
        self.ahead, self.accumulation = ahead, accumulation
        self.replay = replay
        if self.examples == 0:
            raise ValueError("there are no training triples")

    @property
    def every(self) -> int:
        """Examples that there are."""
        raise NotImplementedError

    @property
    def examples(self) -> int:
        """What an epoch passes through."""
        return replayed_size(self.every, *self.replay)

    def order(self, epoch: int) -> Order:
        """Which example comes where in an epoch."""
        if self.examples == self.every:
            order: Order = EpochShuffle(self.every, self.seed, epoch)
            return order if self.draw is None else self.draw.of(order, self.seed, epoch)
        assert self.draw is None  # which ``replay_of`` has refused
        return ReplayShuffle(self.every, *self.replay, self.seed, epoch)

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> B:
        """The batch of one step of an epoch, or a part of it with accumulation; may be empty."""
        raise NotImplementedError

    @property
    def steps_per_epoch(self) -> int:
        """Steps an epoch, the same on every rank; the last one may be smaller."""
        return -(-self.examples // self.batch_size)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[B]:
        """This rank's batches of an epoch, from ``first_step`` on: ``accumulation`` for a step."""
        order = self.order(epoch)
        parts = range(first_step * self.accumulation, self.steps_per_epoch * self.accumulation)

        def build(part: int) -> B:
            return self.batch(order, epoch, *divmod(part, self.accumulation))

        if not self.ahead:
            yield from map(build, parts)
        else:
            yield from prefetched(lambda part: _pinned(build(part)), parts)


def _pinned(batch: B) -> B:
    return batch.pin_memory() if torch.cuda.is_available() else batch


SIDE_CODES: dict[Side, int] = {"head": 0, "tail": 1}

# Bags that the ids of a lookup are dealt into.  What they mean is the same in any number of them,
# but FBGEMM's CUDA kernels give each bag one thread or one warp: a batch in one bag would be walked
# by a single one.  The same number on all ranks and in all steps: TorchRec takes anything else for
# batches of variable size, which it sends in another, slower way.
LOOKUP_BAGS = {"cpu": 1, "cuda": 4096}


@dataclass
class Batch(Pipelineable):
    """One rank's share of a step.

    Entities are de-duplicated, so that the lookup fetches each id once, unless asked otherwise.
    """

    ids: KeyedJaggedTensor  # the U unique entity ids, ascending, under one key
    entities: Tensor  # (2 C b + C K of each side) positions in ids: heads, tails, candidates
    relation: Tensor  # (C, b)
    weight: Tensor  # (C, b) float32: a triple's share of the global batch, by their weights if
    # they have any, times the world size; 0 on padding
    known_head: Tensor  # (C, b, K) bool: head candidates that are no negatives, since they make a
    # known fact or do not suit the triple; empty if unused
    known_tail: Tensor
    candidates: tuple[int, ...]  # K of each side
    log_expected: Tensor  # (C K of each side) log of how often a chunk has it; empty if unused
    # False: ids holds every entity of ``entities``, in that order, duplicates included
    deduplicated: bool = True


@dataclass(frozen=True)
class Share:
    """Which positions of a global batch a rank trains, laid out in chunks."""

    positions: np.ndarray  # (C, b) positions in the global batch
    mask: np.ndarray  # (C, b) bool, False on padding
    first_chunk: int


def share_of(batch: int, chunk_size: int, rank: int, world_size: int) -> Share:
    """Rank's share of a global batch of ``batch`` triples.

    Positions are dealt in equal runs.  A run that reaches over several chunks is padded to whole
    chunks; one inside a single chunk is not.
    """
    start, stop = batch * rank // world_size, batch * (rank + 1) // world_size
    if start == stop:
        empty = np.zeros((0, 0), dtype=np.int64)
        return Share(empty, empty.astype(bool), 0)
    first, last = start // chunk_size, (stop - 1) // chunk_size
    if first == last:
        positions = np.arange(start, stop)[None]
        return Share(positions, np.ones_like(positions, dtype=bool), first)
    grid = np.arange(first * chunk_size, (last + 1) * chunk_size).reshape(-1, chunk_size)
    mask = (grid >= start) & (grid < stop)
    return Share(np.clip(grid, start, stop - 1), mask, first)


class BatchBuilder(EpochBatches[Batch]):
    """Builds batch (epoch, step) for one rank.

    triples: (T, 3) integer array (memory-mapped is fine), columns head, relation, tail.
    chunk_size: triples that share negatives; 1 gives each its own, 0 shares over the whole batch.
    known: facts never used as negatives, or None.
    ahead: build a few batches ahead in threads, in pinned memory where there is CUDA; for GPUs,
        which would wait otherwise.
    deduplicate: look each entity of a batch up once; False asks for every one of them, which costs
        more traffic and is there to be measured.
    bags: that the ids are dealt into, see LOOKUP_BAGS.
    accumulation: micro-batches that a rank's share of a step comes in.  They hold the same triples,
        negatives and weights as the share in one piece, so their gradients sum to its gradient.
    drawn: candidates drawn for a chunk of each side; None draws the sampler's count.
    in_batch: the answers of a chunk's triples, also of those that other ranks train, are candidates
        after the drawn ones.  A chunk that the batch cuts short has its own repeated.
    degrees: of the training triples; given, batches say how often a chunk is expected to have each
        of its candidates.
    weights: (T,) of the triples in the loss, which count over their mean; None weighs all alike.
    draw: which triples an epoch passes through; None takes each once.
    suited: makes negatives of the drawn ones that suit the triples.
    """

    def __init__(
        self,
        triples: np.ndarray,
        batch_size: int,
        sampler: NegativeSampler,
        *,
        sides: Sequence[Side] = SIDES,
        chunk_size: int = 0,
        known: FilterIndex | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        ahead: bool = False,
        deduplicate: bool = True,
        bags: int = 1,
        accumulation: int = 1,
        drawn: Mapping[Side, int] | None = None,
        in_batch: bool = False,
        degrees: Degrees | None = None,
        replay: tuple[int, float] = (0, 1.0),
        weights: np.ndarray | None = None,
        draw: WeightedDraw | None = None,
        suited: SuitedNegatives | None = None,
    ):
        self.triples, self.sampler, self.weights = triples, sampler, weights
        self._mean_weight = mean_of(weights)
        self.suited = suited
        self.drawn = drawn or dict.fromkeys(SIDES, sampler.count)
        self.in_batch, self.degrees = in_batch, degrees
        super().__init__(batch_size, seed, ahead, accumulation, replay, draw)
        self.sides, self.known = tuple(sides), known
        self.chunk_size = chunk_size or batch_size
        self.rank, self.world_size = rank, world_size
        self.deduplicate, self.bags = deduplicate, bags

    @property
    def every(self) -> int:
        """The T triples."""
        return len(self.triples)

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> Batch:
        """The batch of one step of an epoch, or a part of it with accumulation; may be empty."""
        start = step * self.batch_size
        size = min(self.batch_size, self.examples - start)
        # A rank's parts are what as many ranks more would take.
        number, parts = self.rank * self.accumulation + part, self.world_size * self.accumulation
        share = share_of(size, self.chunk_size, number, parts)
        index = order(start + share.positions.reshape(-1))
        rows = self.triples[index].astype(np.int64)
        chunks, triples = share.positions.shape
        of_chunks = rows[:0]
        if self.in_batch or self.suited is not None:
            of_chunks = self.triples[order(start + self._chunk_positions(share, size))]
        negatives = self._drawn(epoch, step, share, of_chunks)
        if self.in_batch:
            for side, ids in negatives.items():
                answers = of_chunks[:, 0 if side == "head" else 2].astype(np.int64)
                negatives[side] = np.concatenate([ids, answers.reshape(-1, self.chunk_size)], 1)
        head, relation, tail = rows[:, 0], rows[:, 1], rows[:, 2]
        ids = np.concatenate([head, tail, *(negatives[s].reshape(-1) for s in self.sides)])
        unique, entities = distinct(ids)
        masks = {side: self._known(side, rows, negatives, chunks) for side in SIDES}
        weight = share.mask.astype(np.float32) * (self.world_size / size)
        if self.weights is not None:
            weight *= (self.weights[index] / self._mean_weight).reshape(weight.shape)
        return Batch(
            ids=as_feature(torch.from_numpy(unique if self.deduplicate else ids), self.bags),
            entities=torch.from_numpy(entities),
            relation=torch.from_numpy(np.ascontiguousarray(relation).reshape(chunks, triples)),
            weight=torch.from_numpy(weight),
            known_head=masks["head"],
            known_tail=masks["tail"],
            candidates=tuple(ids.shape[1] for ids in negatives.values()),
            log_expected=self._log_expected(negatives),
            deduplicated=self.deduplicate,
        )

    def _drawn(
        self, epoch: int, step: int, share: Share, of_chunks: np.ndarray
    ) -> dict[Side, np.ndarray]:
        """(C, K) ids of each side; of_chunks: the chunks' triples, if they matter."""
        found: dict[Side, np.ndarray] = {}
        for side in self.sides:
            place = epoch, step, SIDE_CODES[side], share.first_chunk
            unit = self.sampler.numbers(*place, len(share.positions), self.drawn[side])
            found[side] = self.sampler.of(unit)
            if self.suited is not None and len(of_chunks):
                triples = of_chunks.astype(np.int64).reshape(len(unit), -1, 3)
                self.suited.replace(side, found[side], unit, triples)
        return found

    def _chunk_positions(self, share: Share, size: int) -> np.ndarray:
        """(C chunk size) positions in a global batch of ``size`` of whole chunks, repeated."""
        first = (share.first_chunk + np.arange(len(share.positions))[:, None]) * self.chunk_size
        places = first + np.arange(self.chunk_size) % np.minimum(self.chunk_size, size - first)
        return places.reshape(-1)

    def _log_expected(self, negatives: Mapping[Side, np.ndarray]) -> Tensor:
        """Log of the number of times that a chunk is expected to have each of its candidates."""
        if self.degrees is None:
            return torch.zeros(0)
        found = []
        for side, ids in negatives.items():
            expected = self.drawn[side] * self.sampler.chance(ids)
            if self.in_batch:
                expected += self.chunk_size * self.degrees.share(side, ids)
            found.append(np.log(expected).ravel())
        return torch.from_numpy(np.concatenate(found).astype(np.float32))

    def _known(
        self, side: Side, rows: np.ndarray, negatives: Mapping[Side, np.ndarray], chunks: int
    ) -> Tensor:
        """(C, b, K) bool: which candidates of the side are no negatives; empty if not asked."""
        asked = self.known is not None or self.suited is not None
        if not asked or side not in negatives or len(rows) == 0:
            return torch.zeros(0, dtype=torch.bool)
        ids = negatives[side]
        mask = np.zeros((len(rows), ids.shape[1]), bool)
        if self.known is not None:
            anchors = rows[:, 0] if side == "tail" else rows[:, 2]
            per_triple = np.repeat(ids, len(rows) // chunks, axis=0)
            mask |= self.known.contains(side, anchors, rows[:, 1], per_triple)
        if self.suited is not None:
            mask |= self.suited.unsuited(side, rows, ids, self.drawn[side])
        return torch.from_numpy(mask.reshape(chunks, -1, ids.shape[1]))


def as_feature(ids: Tensor, bags: int = 1) -> KeyedJaggedTensor:
    """Entity ids (M,) as the input of the lookup, dealt evenly into bags; M may be 0.

    The rows come back as ``collection(...)[ENTITY].values()``, (M, D), in the order of the ids.
    """
    count = ids.numel()
    lengths = torch.full((bags,), count // bags, dtype=torch.int64)
    lengths[: count % bags] += 1
    return KeyedJaggedTensor(
        keys=[ENTITY],
        values=ids,
        lengths=lengths,
        stride=bags,
        # said, because TorchRec would else ask the device for them
        length_per_key=[count],
        offset_per_key=[0, count],
    )
