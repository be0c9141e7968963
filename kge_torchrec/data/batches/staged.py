"""Batches of triples for a table of which only some parts are in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data.batches import BatchPlan, Delivery, Order
from kge_torchrec.data.batches.triples import Batch, TripleBatches
from kge_torchrec.data.negatives import Chunks, NegativeSampler
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.data.shuffle import EpochShuffle
from kge_torchrec.data.sort import CHUNK

_STREAM = 0xB0C4  # separates these random streams from others with the same seed


# Has parts in memory for a step, given the part in each place, and the same for the next stage or
# None if these parts stay.  Collective.
Show = Callable[[tuple[int, ...], tuple[int, ...] | None], object]


class BufferSampler(NegativeSampler):
    """Samples the entities of the buffer alike, as Marius and PBG do."""

    def __init__(self, layout: PartLayout, buffer: tuple[int, ...]):
        self.layout, self.buffer = layout, buffer

    def sample(self, chunks: Chunks) -> Tensor:
        return torch.from_numpy(self.layout.entities_of(chunks.numbers.numpy(), self.buffer))


def _over(sampler: Any, base: NegativeSampler) -> NegativeSampler:
    """Return a sampler with another one for those that sample among all entities."""
    if not hasattr(sampler, "others"):
        return base
    changed: Any = copy.copy(sampler)
    changed.others = _over(sampler.others, base)
    return cast(NegativeSampler, changed)


class Stages:
    """The stages of an epoch: which triples and how many steps each of them has.

    The triples of two parts are a bucket.  A bucket is cut into slices of equal size, one for each
    stage that has both parts.  The positions of an epoch go through the slices of the first stage,
    then those of the second:

        buffers      slices                    if bucket (0, 0) has 7 triples, others 4 each
        (0, 1)       00 01 10 11               positions 0-2, 3-6, 7-10, 11-14
        (0, 2)       00 02 20 22               positions 15-18, 19-22, 23-26, 27-30

    Args:
        buffers: The part in each place, stage by stage.
        counts: (P, P) triples by the parts of head and tail.
        steps: Steps of the epoch.
        batch_size: Most triples of a step.
        seed: Seed of which triples of a bucket are in which slice.
    """

    def __init__(
        self,
        buffers: list[tuple[int, ...]],
        counts: np.ndarray,
        steps: int,
        batch_size: int,
        seed: np.random.SeedSequence,
    ):
        self.buffers, parts = buffers, np.array(buffers)
        self._counts = counts.ravel()
        self._bucket = (parts[:, :, None] * len(counts) + parts[:, None]).ravel()  # of each slice
        slices = np.bincount(self._bucket, minlength=counts.size)  # of each bucket
        number = np.empty_like(self._bucket)  # of each slice in its bucket
        number[np.argsort(self._bucket, kind="stable")] = np.concatenate([*map(np.arange, slices)])
        size, among = self._counts[self._bucket], slices[self._bucket]
        self._start = size * number // among  # of each slice, in its bucket
        ends = np.cumsum(size * (number + 1) // among - self._start)
        self._first = np.append(0, ends[:-1])  # position of each slice
        self._shift = np.random.default_rng(seed).integers(0, np.maximum(1, self._counts))
        per_stage = parts.shape[1] ** 2
        self.first = np.append(0, ends[per_stage - 1 :: per_stage])  # of each stage, and the end
        self.steps = _shared_out(np.diff(self.first), steps, batch_size)

    def at(self, step: int) -> tuple[int, int, int]:
        """Return the stage of a step, the step's first position, and the number of its triples."""
        stage = int(np.searchsorted(np.cumsum(self.steps), step, "right"))
        own = step - int(self.steps[:stage].sum())
        first, stop = self.first[stage : stage + 2].tolist()
        begin, end = (first + (stop - first) * k // int(self.steps[stage]) for k in (own, own + 1))
        return stage, begin, end - begin

    def triples_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bucket (M,) and the number within it (M,) at positions of the epoch."""
        index = np.searchsorted(self._first, positions, "right") - 1
        bucket = self._bucket[index]
        place, size = positions - self._first[index] + self._start[index], self._counts[bucket]
        # A prime is coprime to every smaller size, so this is a permutation of the bucket.
        return bucket, (place * (_PRIME % size) + self._shift[bucket]) % size


_PRIME = 4_294_967_291


def _shared_out(triples: np.ndarray, steps: int, batch_size: int) -> np.ndarray:
    """Return the steps of each stage: enough of them, the rest where steps are largest."""
    shares = -(-triples // batch_size)
    for _ in range(steps - int(shares.sum())):
        shares[np.argmax(np.where(shares < triples, triples / np.maximum(1, shares), 0))] += 1
    return shares


class StagedBatches(TripleBatches):
    """Makes batches whose entities are all in memory, stage by stage.

    A stage has its triples in random order, in steps of its own, which have up to ``batch_size``
    triples.  Candidates are entities of the buffer.

    Args:
        triples, plan, delivery, weights: As for ``TripleBatches``.
        layout: How the table is cut into parts.
        show: Brings parts into memory, see ``Show``.
    """

    def __init__(
        self,
        triples: np.ndarray,
        plan: BatchPlan,
        delivery: Delivery,
        weights: np.ndarray | None,
        layout: PartLayout,
        show: Show,
    ):
        super().__init__(triples, plan, delivery, weights)
        self.layout, self.show = layout, show
        self._by_bucket, self._counts = sort_by_bucket(triples, layout)
        self._bucket_first = np.cumsum(self._counts) - self._counts
        self._stages: dict[int, Stages] = {}

    @cached_property  # every step reads it
    def steps_per_epoch(self) -> int:
        """Steps of every epoch: those of full batches, and one for each exchange of parts."""
        return min(super().steps_per_epoch + self.layout.exchanges, self.examples)

    def stages(self, epoch: int) -> Stages:
        """Return the stages of an epoch."""
        if epoch not in self._stages:
            parts, seed = self.layout.parts, self.plan.seed
            self._stages = {
                epoch: Stages(
                    self.layout.buffers(seed, epoch),
                    self._counts.reshape(parts, parts),
                    self.steps_per_epoch,
                    self.plan.batch_size,
                    np.random.SeedSequence(seed, spawn_key=(epoch, _STREAM)),
                )
            }
        return self._stages[epoch]

    def positions(self, epoch: int, step: int) -> tuple[int, int]:
        return self.stages(epoch).at(step)[1:]

    def order(self, epoch: int) -> Order:
        stages = self.stages(epoch)

        def triples_at(positions: np.ndarray) -> np.ndarray:
            if not len(positions):
                return positions
            stage = int(np.searchsorted(stages.first, positions[0], "right")) - 1
            first, stop = stages.first[stage : stage + 2].tolist()
            shuffled = first + EpochShuffle(stop - first, self.plan.seed, epoch)(positions - first)
            bucket, place = stages.triples_at(shuffled)
            return self._by_bucket[self._bucket_first[bucket] + place].astype(np.int64)

        return triples_at

    def buffer_at(self, epoch: int, step: int) -> tuple[int, ...]:
        """Return the part in each place in a step."""
        stages = self.stages(epoch)
        return stages.buffers[stages.at(step)[0]]

    def batch(self, order: Order, epoch: int, step: int, part: int = 0, *_: object) -> Batch:
        buffer = self.buffer_at(epoch, step)
        sampler = _over(self.sampler, BufferSampler(self.layout, buffer))

        def rows_of(ids: Tensor) -> Tensor:
            return torch.from_numpy(self.layout.rows_of(ids.numpy(), buffer))

        return super().batch(order, epoch, step, part, sampler, rows_of)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Iterate as ``EpochBatches.epoch``; before each batch its parts are in memory."""
        stages, count = self.stages(epoch), self.plan.accumulation
        for place, batch in enumerate(super().epoch(epoch, first_step), first_step * count):
            stage = stages.at(place // count)[0]
            later = [i for i in range(stage + 1, len(stages.steps)) if stages.steps[i]]
            following = stages.buffers[later[0]] if later else None
            self.show(stages.buffers[stage], following)
            yield batch


def sort_by_bucket(triples: np.ndarray, layout: PartLayout) -> tuple[np.ndarray, np.ndarray]:
    """Sort triples by bucket, in memory for their numbers and a chunk.

    Args:
        triples: (T, 3) integers; may be memory-mapped.
        layout: The layout.

    Returns:
        Numbers of the triples (T,), bucket by bucket, and the triples of each bucket (P * P,).
    """
    chunks = range(0, len(triples), CHUNK)
    counts = np.zeros(layout.parts**2, np.int64)
    for start in chunks:
        counts += np.bincount(
            layout.bucket_of(triples[start : start + CHUNK]), minlength=len(counts)
        )
    numbers = np.empty(len(triples), np.uint32 if len(triples) < 1 << 32 else np.int64)
    free = np.cumsum(counts) - counts
    for start in chunks:
        bucket = layout.bucket_of(triples[start : start + CHUNK])
        order = np.argsort(bucket, kind="stable")
        own = np.bincount(bucket, minlength=len(counts))
        place = np.arange(len(bucket)) + np.repeat(free - (np.cumsum(own) - own), own)
        numbers[place] = start + order
        free += own
    return numbers, counts
