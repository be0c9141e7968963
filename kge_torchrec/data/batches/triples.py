"""Batches of triples with sampled candidates: this rank's share of every step.

A step takes a run of positions of the epoch's order, and rank r takes the r-th part of the run.
Chunks are cut at fixed positions of the step, so training does not depend on the world size.
A GPU that holds the triples makes the batches from positions and random numbers of the CPU.

Shapes: T triples, C chunks, b triples per chunk, B = C b triples, K candidates per chunk and side,
U unique entities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config import Config
from kge_torchrec.data.batches import (
    BatchPlan,
    Delivery,
    EpochBatches,
    Order,
    SampledBatch,
    lookup_of,
    mean_weight,
)
from kge_torchrec.data.negatives import Chunks, NegativeSampler, random_numbers
from kge_torchrec.data.sort import CHUNK

RowsOf = Callable[[Tensor], Tensor]  # entities (M,) -> rows (M,) of the table
_SHARE, _SHARE_OF_FREE = 1 / 8, 1 / 2  # of a GPU's memory, which triples may take


@dataclass
class Batch(SampledBatch):
    """One rank's share of a step of triples.

    The entities are 2 C b + C K of each side: heads, tails, candidates.  ``known_head`` and
    ``known_tail`` mark candidates that are no negatives of a triple: they make a known fact, or the
    sampler excludes them.
    """

    relation: Tensor  # (C, b) ids
    weight: Tensor  # (C, b) share of the step's loss, times the world size; 0 on padding
    known_head: Tensor  # (C, b, K) bool; empty if unused
    known_tail: Tensor
    sizes: tuple[int, ...]  # of heads, of tails, and of candidates of each side in ``entities``
    log_expected: Tensor  # (C K of each side) times that a chunk has it, or empty


def share_of(size: int, chunk_size: int, number: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return one of ``count`` shares of a step of ``size`` triples, laid out in chunks.

    Shares are equal runs of positions (C, b).  A run over several chunks is padded to whole chunks,
    by positions of its own, which are False in the second result; one in a single chunk is not.
    """
    start, stop = size * number // count, size * (number + 1) // count
    first, last = start // chunk_size, (stop - 1) // chunk_size
    grid = np.arange(start, stop)[None][: stop - start]  # no chunk without a triple
    if first < last:
        grid = np.arange(first * chunk_size, (last + 1) * chunk_size).reshape(-1, chunk_size)
    return grid.clip(start, stop - 1), (grid >= start) & (grid < stop)


def device_bytes(config: Config, triples: int, entities: int = 0, pairs: int = 0) -> int:
    """Return the bytes of what makes batches on a device.

    ``entities`` and ``pairs`` (of an entity and a feature) count if entities have features.
    """
    # A triple has ids, and keys of at most 16 bytes if it is a known fact.
    return triples * (12 + 16 * config.negatives.filtered) + 9 * entities + 12 * pairs


def fits_device(size: int, memory: float, free: float) -> bool:
    """Return whether train.batches auto puts triples of some bytes into the memory of a GPU."""
    return size <= min(memory * _SHARE, free * _SHARE_OF_FREE)


class TripleBatches(EpochBatches[Batch]):
    """Makes the batches of triples with sampled candidates.

    Args:
        triples: (T, 3) integers, columns head, relation, tail; may be memory-mapped.
        plan: What the batches contain, with a ``sampler``.
        delivery: This rank's share.
        weights: (T,) in the loss.
        device: Where the triples are kept and the batches made; None reads the triples as they are
            needed, and makes batches on the CPU.
    """

    def __init__(
        self,
        triples: np.ndarray,
        plan: BatchPlan,
        delivery: Delivery | None = None,
        weights: np.ndarray | None = None,
        device: torch.device | None = None,
    ):
        super().__init__(len(triples), plan, delivery, device)
        assert plan.sampler is not None
        self.triples, self.weights, self._mean_weight = triples, weights, mean_weight(weights)
        self.sampler, self.features = plan.sampler, plan.features
        self.chunk_size = plan.chunk_size or plan.batch_size
        self.resident: Tensor | None = None
        if device is None:
            return
        self.resident = torch.empty(len(triples), 3, dtype=torch.int32, device=device)
        for start in range(0, len(triples), CHUNK):
            part = slice(start, start + CHUNK)
            self.resident[part] = torch.from_numpy(triples[part].astype(np.int32))
        self.sampler = self.sampler.to(device)
        self.features = None if self.features is None else self.features.to(device)

    def batch(
        self,
        order: Order,
        epoch: int,
        step: int,
        part: int = 0,
        sampler: NegativeSampler | None = None,
        rows_of: RowsOf | None = None,
    ) -> Batch:
        """Return the batch as `EpochBatches.batch`.

        A step may have its own sampler, and rows of entities in the table other than their ids.
        """
        (start, size), world = self.positions(epoch, step), self.delivery.world_size
        accumulation, sampler = self.plan.accumulation, sampler or self.sampler
        number = self.delivery.rank * accumulation + part
        positions, inside = share_of(size, self.chunk_size, number, world * accumulation)
        index = order(start + positions.reshape(-1))
        rows = self._triples_at(index)
        weight = inside.astype(np.float32) * (world / size)
        if self.weights is not None:
            weight *= (self.weights[index] / self._mean_weight).reshape(weight.shape)
        first = positions[0, 0] // self.chunk_size if positions.size else 0
        chunks = range(first, first + len(positions))
        # Most samplers do not look at the triples of their chunks.
        triples = cache(partial(self._whole_chunks, order, start, size, chunks))
        parts, logs = [rows[:, 0], rows[:, 2]], []
        nothing = torch.zeros(0, dtype=torch.bool, device=self.device)
        known = {"head": nothing, "tail": nothing}
        for side in self.plan.sides:
            place, count = (epoch, step, side), self.plan.counts[side]
            numbers = self._there(random_numbers(self.plan.seed, place, chunks, count))
            drawn = Chunks(side, numbers, triples)
            candidates = sampler.sample(drawn)
            parts.append(candidates.reshape(-1))
            mask = sampler.excluded(drawn, rows, candidates) if len(chunks) else None
            if mask is not None:
                known[side] = mask.view(len(chunks), -1, candidates.shape[1])
            if self.plan.log_q:
                logs.append(sampler.expected(drawn, candidates).log().float().view(-1))
        every = torch.cat(parts)
        every = every if rows_of is None else rows_of(every)
        return Batch(
            **lookup_of(every, self.features, self.delivery),
            relation=rows[:, 1].reshape(positions.shape).contiguous(),
            weight=self._there(torch.from_numpy(weight)),
            known_head=known["head"],
            known_tail=known["tail"],
            sizes=tuple(map(len, parts)),
            log_expected=torch.cat(logs) if logs else torch.zeros(0, device=self.device),
        )

    def _there(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)

    def _triples_at(self, index: np.ndarray) -> Tensor:
        """Return the triples (M, 3) int64 with some numbers (M,)."""
        if self.resident is None:
            return torch.from_numpy(self.triples[index].astype(np.int64))
        return self.resident[self._there(torch.from_numpy(index))].long()

    def _whole_chunks(self, order: Order, start: int, size: int, chunks: range) -> Tensor:
        """Return the triples of chunks, also those that other ranks train: (C, chunk_size, 3).

        A chunk that the step cuts short is repeated.
        """
        begin = np.arange(chunks.start, chunks.stop)[:, None] * self.chunk_size
        places = begin + np.arange(self.chunk_size) % np.minimum(self.chunk_size, size - begin)
        rows = self._triples_at(order(start + places.reshape(-1)))
        return rows.view(len(chunks), self.chunk_size, 3)
