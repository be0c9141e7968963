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
from kge_torchrec.data.sort import CHUNK, chunks, id_counts

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

    A triple is in one of the stages that have the parts of its head and its tail, chosen at random.

    Attributes:
        buffers: The part in each place, by stage.
        triples: (T,) numbers of the triples, stage by stage.
        first: Where the triples of each stage start among them, and their number.
        steps: Steps of each stage.
    """

    def __init__(
        self,
        layout: PartLayout,
        triples: np.ndarray,
        steps: int,
        batch_size: int,
        seed: int,
        epoch: int,
    ):
        self.buffers = layout.buffers(seed, epoch)
        parts, total = np.array(self.buffers), len(triples)
        # The stages of each bucket: the pair of the parts of a head and a tail.
        bucket = (parts[:, :, None] * layout.parts + parts[:, None]).reshape(-1)
        stages = np.argsort(bucket, kind="stable") // parts.shape[1] ** 2
        counts = np.bincount(bucket, minlength=layout.parts**2)
        before, drawn = np.cumsum(counts) - counts, EpochShuffle(total, seed, epoch)
        stage = np.empty(total, np.min_scalar_type(len(parts)))
        for start, rows in zip(range(0, total, CHUNK), chunks(triples), strict=True):
            numbers, bucket = np.arange(start, start + len(rows)), layout.bucket_of(rows)
            stage[numbers] = stages[before[bucket] + drawn(numbers) % counts[bucket]]
        self.triples, sizes = sorted_numbers(stage, len(parts))
        self.first = np.append(0, np.cumsum(sizes))
        # Enough steps for the triples of each stage, the rest where steps are largest.
        self.steps = -(-sizes // batch_size)
        for _ in range(steps - int(self.steps.sum())):
            room = np.where(self.steps < sizes, sizes / np.maximum(1, self.steps), 0)
            self.steps[room.argmax()] += 1

    def at(self, step: int) -> tuple[int, int, int]:
        """Return the stage of a step, the step's first position, and the number of its triples."""
        stage = int(np.searchsorted(np.cumsum(self.steps), step, "right"))
        own = step - int(self.steps[:stage].sum())
        first, stop = self.first[stage : stage + 2].tolist()
        begin, end = (first + (stop - first) * k // int(self.steps[stage]) for k in (own, own + 1))
        return stage, begin, end - begin


class StagedBatches(TripleBatches):
    """Makes batches whose entities are all in memory, stage by stage.

    A stage has its triples in random order, in steps of its own, which have up to ``batch_size``
    triples.  Candidates are entities of the buffer.
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
        self._stages: dict[int, Stages] = {}

    @cached_property  # every step reads it
    def steps_per_epoch(self) -> int:
        """Steps of every epoch: those of full batches, and one for each exchange of parts."""
        return min(super().steps_per_epoch + self.layout.exchanges, self.examples)

    def stages(self, epoch: int) -> Stages:
        """Return the stages of an epoch."""
        if epoch not in self._stages:
            sizes = self.steps_per_epoch, self.plan.batch_size
            self._stages.clear()  # they take 4 bytes per triple
            made = Stages(self.layout, self.triples, *sizes, self.plan.seed, epoch)
            self._stages[epoch] = made
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
            return stages.triples[shuffled].astype(np.int64)

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


def sorted_numbers(keys: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers (T,) of keys in [0, count) in stable order, and how many each has.

    It sorts in pieces, since argsort takes 8 bytes per key.
    """
    counts = id_counts(keys, count)
    numbers = np.empty(len(keys), np.uint32 if len(keys) < 1 << 32 else np.int64)
    free = np.cumsum(counts) - counts
    for start, part in zip(range(0, len(keys), CHUNK), chunks(keys), strict=True):
        own = np.bincount(part, minlength=count)
        place = np.arange(len(part)) + np.repeat(free - (np.cumsum(own) - own), own)
        numbers[place] = start + np.argsort(part, kind="stable")
        free += own
    return numbers, counts
