"""Batches of triples for a table of which only some parts are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from kge_torchrec.data.batches import BatchPlan, Delivery
from kge_torchrec.data.batches.order import EpochShuffle, Order
from kge_torchrec.data.batches.triples import Batch, TripleBatches
from kge_torchrec.data.negatives import InBatchSampler, NegativeSampler
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.data.relation_weights import Weights
from kge_torchrec.data.sort import CHUNK


class Buffer(Protocol):
    """The parts in memory."""

    def show(self, parts: tuple[int, ...], following: tuple[int, ...] | None) -> None:
        """Have these parts in memory, in these places, for a step.  Collective.

        Args:
            parts: The part in each place.
            following: The same for the next stage; None if these parts stay.
        """


class BufferSampler(NegativeSampler):
    """Samples the entities of the buffer alike, as Marius and PBG do."""

    def __init__(self, layout: PartLayout, buffer: tuple[int, ...]):
        self.layout, self.buffer = layout, buffer

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        return self.layout.entities_of(numbers, self.buffer)

    def chance(self, ids: np.ndarray) -> np.ndarray:
        return np.full(ids.shape, 1 / self.layout.sizes[list(self.buffer)].sum())


class StagedBatches(TripleBatches):
    """Makes batches whose entities are all in memory, stage by stage.

    A stage has its triples in random order, in steps of its own; the last step of a stage may be
    smaller.  Candidates are entities of the buffer.

    Args:
        triples, plan, delivery, weights: As for ``TripleBatches``.
        layout: How the table is cut into parts.
        buffer: Brings parts into memory.
    """

    def __init__(
        self,
        triples: np.ndarray,
        plan: BatchPlan,
        delivery: Delivery,
        weights: Weights | None,
        layout: PartLayout,
        buffer: Buffer,
    ):
        super().__init__(triples, plan, delivery, weights)
        self.layout, self.buffer = layout, buffer
        self._by_stage, counts = sort_by_stage(triples, layout)
        self._first = np.concatenate([[0], np.cumsum(counts)])  # position of each stage
        self._steps = -(-counts // plan.batch_size)
        forward = np.flatnonzero(counts)
        self._orders = forward, forward[::-1]  # of even and of odd epochs
        self._samplers = [self._sampler_of(parts) for parts in layout.stages]

    def _sampler_of(self, parts: tuple[int, ...]) -> NegativeSampler:
        sampler = BufferSampler(self.layout, parts)
        if isinstance(self.sampler, InBatchSampler):
            return InBatchSampler(sampler, self.sampler.degrees, self.sampler.same_relation)
        return sampler

    @property
    def steps_per_epoch(self) -> int:
        return int(self._steps.sum())

    def stage_at(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the stage of a step, and the number of the step in its stage."""
        order = self._orders[epoch % 2]
        ends = np.cumsum(self._steps[order])
        place = int(np.searchsorted(ends, step, "right"))
        return int(order[place]), step - int(ends[place] - self._steps[order[place]])

    def positions(self, epoch: int, step: int) -> tuple[int, int]:
        stage, own = self.stage_at(epoch, step)
        start = int(self._first[stage]) + own * self.plan.batch_size
        return start, min(self.plan.batch_size, int(self._first[stage + 1]) - start)

    def order(self, epoch: int) -> Order:
        def triples_at(positions: np.ndarray) -> np.ndarray:
            stage = int(np.searchsorted(self._first, positions[0], "right")) - 1
            first, stop = self._first[stage : stage + 2]
            shuffled = EpochShuffle(int(stop - first), self.plan.seed, epoch)
            return self._by_stage[first + shuffled(positions - first)].astype(np.int64)

        return lambda positions: triples_at(positions) if len(positions) else positions

    def sampler_at(self, epoch: int, step: int) -> NegativeSampler:
        return self._samplers[self.stage_at(epoch, step)[0]]

    def rows_at(self, epoch: int, step: int, ids: np.ndarray) -> np.ndarray:
        return self.layout.rows_of(ids, self.layout.stages[self.stage_at(epoch, step)[0]])

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Iterate as ``EpochBatches.epoch``; before each batch its parts are in memory."""
        count = self.plan.accumulation
        for place, batch in enumerate(super().epoch(epoch, first_step), first_step * count):
            self.buffer.show(*self._buffers(epoch, place // count))
            yield batch

    def _buffers(self, epoch: int, step: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the buffer of a step, and that of the next stage of the epoch."""
        stages, order = self.layout.stages, self._orders[epoch % 2]
        now, _ = self.stage_at(epoch, step)
        later = order[int(np.flatnonzero(order == now)[0]) + 1 :]
        return stages[now], stages[later[0]] if len(later) else None


def sort_by_stage(triples: np.ndarray, layout: PartLayout) -> tuple[np.ndarray, np.ndarray]:
    """Sort triples by the stage that trains them, in memory for their numbers and a chunk.

    Args:
        triples: (T, 3) integers; may be memory-mapped.
        layout: The layout.

    Returns:
        Numbers of the triples (T,), stage by stage, and the triples of each stage.
    """
    chunks = range(0, len(triples), CHUNK)
    counts = np.zeros(len(layout.stages), np.int64)
    for start in chunks:
        counts += np.bincount(
            layout.stage_of(triples[start : start + CHUNK]), minlength=len(counts)
        )
    numbers = np.empty(len(triples), np.uint32 if len(triples) < 1 << 32 else np.int64)
    free = np.cumsum(counts) - counts
    for start in chunks:
        stage = layout.stage_of(triples[start : start + CHUNK])
        order = np.argsort(stage, kind="stable")
        own = np.bincount(stage, minlength=len(counts))
        place = np.arange(len(stage)) + np.repeat(free - (np.cumsum(own) - own), own)
        numbers[place] = start + order
        free += own
    return numbers, counts
