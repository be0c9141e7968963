"""The steps of an epoch, in an order that is a function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from kge_torchrec.data.ahead import batches_ahead
from kge_torchrec.data.movable import Movable
from kge_torchrec.data.order import EpochOrder

B = TypeVar("B", bound=Movable)


class EpochBatches(Generic[B]):
    """One rank's batches; subclasses say how many ``examples`` there are and build a ``batch``.

    batch_size: examples a step over all ranks.
    ahead: build a few batches ahead in threads, in pinned memory where there is CUDA; for GPUs,
        which would wait otherwise.
    accumulation: micro-batches that a rank's share of a step comes in.
    """

    def __init__(self, batch_size: int, seed: int, ahead: bool, accumulation: int):
        self.batch_size, self.seed = batch_size, seed
        self.ahead, self.accumulation = ahead, accumulation
        if self.examples == 0:
            raise ValueError("there are no training triples")

    @property
    def examples(self) -> int:
        """What an epoch passes through."""
        raise NotImplementedError

    def batch(self, order: EpochOrder, epoch: int, step: int, part: int = 0) -> B:
        """The batch of one step of an epoch, or a part of it with accumulation; may be empty."""
        raise NotImplementedError

    @property
    def steps_per_epoch(self) -> int:
        """Steps an epoch, the same on every rank; the last one may be smaller."""
        return -(-self.examples // self.batch_size)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[B]:
        """This rank's batches of an epoch, from ``first_step`` on: ``accumulation`` for a step."""
        order = EpochOrder(self.examples, self.seed, epoch)
        parts = range(first_step * self.accumulation, self.steps_per_epoch * self.accumulation)

        def build(part: int) -> B:
            return self.batch(order, epoch, *divmod(part, self.accumulation))

        if not self.ahead:
            yield from map(build, parts)
        else:
            yield from batches_ahead(lambda part: _pinned(build(part)), parts)


def _pinned(batch: B) -> B:
    return batch.pin_memory() if torch.cuda.is_available() else batch
