"""Batches of triples with sampled candidates: this rank's share of every step.

A step takes a run of positions of the epoch's order, and rank r takes the r-th part of the run.
Triples are grouped into chunks that share candidates.  Chunks are cut at fixed positions of the
step, so training does not depend on the world size.

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

from kge_torchrec.data.batches import (
    BatchPlan,
    Delivery,
    EpochBatches,
    KeyedJaggedTensor,
    Pipelineable,
    as_feature,
    distinct,
    mean_weight,
)
from kge_torchrec.data.batches.order import Order
from kge_torchrec.data.features import Features
from kge_torchrec.data.negatives import Chunks, NegativeSampler, random_numbers

RowsOf = Callable[[np.ndarray], np.ndarray]  # entities (M,) -> rows (M,) of the table


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
        if deduplicate and tags.device.type == "cpu":
            tags, row = map(torch.from_numpy, distinct(tags.numpy()))
        elif deduplicate:
            tags, row = torch.unique(tags, return_inverse=True)
        ids = torch.cat([entities, tags + len(features.own)])
        own = features.own[entities].float()[:, None]
        return ids, cls(own, place, row + len(entities), weight[:, None])

    def composed(self, rows: Tensor) -> Tensor:
        """Return the vectors of entities (U, D) from the rows of entities, then features."""
        own = rows[: len(self.own)] * self.own
        return own.index_add(0, self.place, (rows[self.row] * self.weight).to(own.dtype))


@dataclass
class Batch(Pipelineable):
    """One rank's share of a step.

    Args:
        ids: The U unique entity ids, ascending, under one key.
        entities: (2 C b + C K of each side) heads, tails, candidates: their positions in ids, or
            the ids themselves if these have duplicates.
        relation: (C, b) ids.
        weight: (C, b) float32, a triple's share of the step's loss (in proportion to the weights of
            triples, if they have any) times the world size; 0 on padding.
        known_head: (C, b, K) bool, head candidates that are no negatives of a triple: they make a
            known fact, or the sampler excludes them.  Empty if unused.
        known_tail: The same for tails.
        sizes: Number of heads, of tails, and of candidates of each side in ``entities``.
        log_expected: (C K of each side) log of how often a chunk is expected to have the candidate.
            Empty if unused.
        deduplicated: False: ids holds every entity of ``entities``, in that order, with duplicates.
        bags: `Bags` of the entities, if they have features, whose ids are behind those of entities.
    """

    ids: KeyedJaggedTensor
    entities: Tensor
    relation: Tensor
    weight: Tensor
    known_head: Tensor
    known_tail: Tensor
    sizes: tuple[int, ...]
    log_expected: Tensor
    deduplicated: bool = True
    bags: Bags | None = None


@dataclass(frozen=True)
class Share:
    """The positions of a step that a rank trains, laid out in chunks.

    Args:
        begin: The position of the first place.
        shape: C and b: the places hold neighboring positions, chunk by chunk.
        start, stop: Places before and behind these positions are padding, and repeat them.
        first_chunk: Number of the first chunk in the step.
    """

    begin: int
    shape: tuple[int, int]
    start: int
    stop: int
    first_chunk: int

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Return positions in the step (C, b), and which of them are no padding: (C, b) bool."""
        chunks, width = self.shape
        grid = np.arange(self.begin, self.begin + chunks * width).reshape(self.shape)
        inside = (grid >= self.start) & (grid < self.stop)
        return np.clip(grid, self.start, max(self.start, self.stop - 1)), inside


def share_of(batch: int, chunk_size: int, rank: int, world_size: int) -> Share:
    """Return a rank's share of a step of ``batch`` triples.

    Ranks take equal runs of positions.  A run over several chunks is padded to whole chunks; a run
    inside a single chunk is not.
    """
    start, stop = batch * rank // world_size, batch * (rank + 1) // world_size
    if start == stop:
        return Share(start, (0, 0), start, stop, 0)
    first, last = start // chunk_size, (stop - 1) // chunk_size
    if first == last:
        return Share(start, (1, stop - start), start, stop, first)
    return Share(first * chunk_size, (last + 1 - first, chunk_size), start, stop, first)


class TripleBatches(EpochBatches[Batch]):
    """Makes the batches of triples with sampled candidates.

    Args:
        triples: (T, 3) integers, columns head, relation, tail; may be memory-mapped.
        plan: What the batches contain, with ``candidates``.
        delivery: This rank's share.
        weights: (T,) weights of the triples in the loss; None weighs all alike.
    """

    def __init__(
        self,
        triples: np.ndarray,
        plan: BatchPlan,
        delivery: Delivery | None = None,
        weights: np.ndarray | None = None,
    ):
        super().__init__(len(triples), plan, delivery)
        assert plan.candidates is not None
        self.triples, self.weights, self._mean_weight = triples, weights, mean_weight(weights)
        self.candidates = plan.candidates
        self.sampler = self.candidates.sampler
        self.chunk_size = self.candidates.chunk_size or plan.batch_size

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> Batch:
        """Return the batch of a step, or micro-batch ``part`` of it; it may be empty."""
        start, size = self.positions(epoch, step)
        share = share_of(size, self.chunk_size, *self._part(part))
        positions, inside = share.places()
        index = order(start + positions.reshape(-1))
        rows = self.triples[index].astype(np.int64)
        weight = inside.astype(np.float32) * (self.delivery.world_size / size)
        if self.weights is not None:
            weight *= (self.weights[index] / self._mean_weight).reshape(weight.shape)
        first, count = share.first_chunk, share.shape[0]
        sampler, rows_of = self.table_at(epoch, step)
        # Most samplers do not look at the triples of their chunks.
        triples = cache(partial(self._whole_chunks, order, start, size, first, count))
        parts, logs = [rows[:, 0], rows[:, 2]], []
        nothing = torch.zeros(0, dtype=torch.bool)
        known = {"head": nothing, "tail": nothing}
        for side in self.plan.sides:
            width, place = self.candidates.numbers(side), (epoch, step, side)
            numbers = random_numbers(self.plan.seed, place, range(first, first + count), width)
            chunks = Chunks(side, numbers, triples)
            candidates = sampler.sample(chunks)
            parts.append(candidates.reshape(-1))
            mask = self._excluded(sampler, chunks, rows, candidates) if count else None
            if mask is not None:
                known[side] = torch.from_numpy(mask.reshape(count, -1, candidates.shape[1]))
            if self.candidates.log_q:
                logs.append(np.log(sampler.expected(chunks, candidates)).ravel())
        every = np.concatenate(parts)
        every = every if rows_of is None else rows_of(every)
        deduplicate = self.delivery.deduplicate
        unique, entities = distinct(every) if deduplicate else (every, every)
        ids, bags = Bags.of(self.plan.features, torch.from_numpy(unique), deduplicate)
        log_expected = np.concatenate(logs) if logs else np.empty(0)
        return Batch(
            ids=as_feature(ids, self.delivery.bags),
            entities=torch.from_numpy(entities),
            relation=torch.from_numpy(np.ascontiguousarray(rows[:, 1]).reshape(weight.shape)),
            weight=torch.from_numpy(weight),
            known_head=known["head"],
            known_tail=known["tail"],
            sizes=tuple(map(len, parts)),
            log_expected=torch.from_numpy(log_expected.astype(np.float32)),
            deduplicated=deduplicate,
            bags=bags,
        )

    def table_at(self, epoch: int, step: int) -> tuple[NegativeSampler, RowsOf | None]:
        """Return the sampler of a step, and what returns the rows of entities in its table.

        None where an entity's row has the entity's number.
        """
        return self.sampler, None

    def _whole_chunks(
        self, order: Order, start: int, size: int, first: int, count: int
    ) -> np.ndarray:
        """Return the triples of chunks, also those that other ranks train: (C, chunk_size, 3).

        A chunk that the step cuts short is repeated.
        """
        begin = (first + np.arange(count)[:, None]) * self.chunk_size
        places = begin + np.arange(self.chunk_size) % np.minimum(self.chunk_size, size - begin)
        rows = self.triples[order(start + places.reshape(-1))]
        return rows.astype(np.int64).reshape(count, self.chunk_size, 3)

    def _excluded(
        self, sampler: NegativeSampler, chunks: Chunks, rows: np.ndarray, ids: np.ndarray
    ) -> np.ndarray | None:
        """Return which candidates (C, K) are no negatives: (C b, K) bool, or None for none."""
        known, side = self.candidates.known, chunks.side
        mask = sampler.excluded(chunks, rows, ids)
        if known is not None:
            anchors = rows[:, 0] if side == "tail" else rows[:, 2]
            per_triple = np.repeat(ids, len(rows) // len(ids), axis=0)
            facts = known.contains(side, anchors, rows[:, 1], per_triple)
            mask = facts if mask is None else mask | facts
        return mask
