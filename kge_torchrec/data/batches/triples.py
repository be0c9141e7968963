"""Batches of triples with sampled candidates: this rank's share of every step.

A step takes a run of positions of the epoch's order, and rank r takes the r-th part of the run.
Triples are grouped into chunks that share candidates.  Chunks are cut at fixed positions of the
step, so training does not depend on the world size.

A GPU that holds the training triples makes the batches where they are used, so that it does not
wait for the CPU.  Only positions and random numbers come from the CPU.

Shapes: T triples, C chunks, b triples per chunk, B = C b triples, K candidates per chunk and side,
U unique entities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config import Config
from kge_torchrec.data import Side
from kge_torchrec.data.batches import (
    BatchPlan,
    Delivery,
    EpochBatches,
    SampledBatch,
    lookup_of,
    mean_weight,
)
from kge_torchrec.data.batches.order import Order
from kge_torchrec.data.negatives import (
    Chunks,
    NegativeSampler,
    places_among,
    random_numbers,
)
from kge_torchrec.data.sort import CHUNK
from kge_torchrec.data.store.filter_index import FilterIndex, keys_of
from kge_torchrec.data.streams import in_order
from kge_torchrec.kernels.distinct import on_cpu
from kge_torchrec.kernels.library import arrays

RowsOf = Callable[[Tensor], Tensor]  # entities (M,) -> rows (M,) of the table
_SHARE, _SHARE_OF_FREE = 1 / 8, 1 / 2  # of a GPU's memory, which triples may take
AHEAD = 2  # batches that a GPU makes while it trains on an earlier one


@dataclass
class Batch(SampledBatch):
    """One rank's share of a step of triples.

    The entities are 2 C b + C K of each side: heads, tails, candidates.

    Args:
        relation: (C, b) ids.
        weight: (C, b) float32, a triple's share of the step's loss (in proportion to the weights of
            triples, if they have any) times the world size; 0 on padding.
        known_head: (C, b, K) bool, head candidates that are no negatives of a triple: they make a
            known fact, or the sampler excludes them.  Empty if unused.
        known_tail: The same for tails.
        sizes: Number of heads, of tails, and of candidates of each side in ``entities``.
        log_expected: (C K of each side) log of how often a chunk is expected to have the candidate.
            Empty if unused.
    """

    relation: Tensor
    weight: Tensor
    known_head: Tensor
    known_tail: Tensor
    sizes: tuple[int, ...]
    log_expected: Tensor


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


def device_bytes(config: Config, triples: int, entities: int = 0, pairs: int = 0) -> int:
    """Return the bytes of what makes batches on a device.

    Args:
        config: The config of the run.
        triples: T, which have ids, and keys of at most 16 bytes if they are known facts.
        entities: Number of entities, if they have features.
        pairs: Number of pairs of an entity and a feature.
    """
    return triples * (12 + 16 * config.negatives.filtered) + 9 * entities + 12 * pairs


def fits_device(size: int, memory: float, free: float) -> bool:
    """Return whether train.batches auto puts triples of some bytes into the memory of a GPU."""
    return size <= min(memory * _SHARE, free * _SHARE_OF_FREE)


class KnownFacts:
    """The facts of a filter index, found where batches are made.

    Other devices than a CPU hold at most 16 bytes per triple.

    Args:
        index: The filter index, of one split.
        device: Where the facts are looked up.
    """

    def __init__(self, index: FilterIndex, device: torch.device):
        self.index, self.device = index, device

    @cached_property
    def _keys(self) -> tuple[Tensor, Tensor]:
        """Return the keys of queries (head, relation), and of facts (query, tail), ascending."""
        queries, starts, answers = self.index.side_index("tail")
        numbers = np.repeat(np.arange(len(queries)), np.diff(starts))
        facts = torch.from_numpy(keys_of(numbers, answers))
        return torch.tensor(queries, device=self.device), facts.to(self.device)

    def contain(self, side: Side, triples: Tensor, candidates: Tensor) -> Tensor:
        """Return which candidates (B, K) make known facts of triples (B, 3): (B, K) bool."""
        head, relation, tail = triples.unbind(1)
        anchor = head if side == "tail" else tail
        if on_cpu(candidates):
            return torch.from_numpy(
                self.index.contains(side, *arrays(anchor, relation, candidates))
            )
        heads, tails = (anchor[:, None], candidates)[:: 1 if side == "tail" else -1]
        queries, facts = self._keys
        query, is_query = places_among(queries, (heads << 32) | relation[:, None])
        return is_query & places_among(facts, (query << 32) | tails)[1]


class TripleBatches(EpochBatches[Batch]):
    """Makes the batches of triples with sampled candidates.

    Args:
        triples: (T, 3) integers, columns head, relation, tail; may be memory-mapped.
        plan: What the batches contain, with ``candidates``.
        delivery: This rank's share.
        weights: (T,) weights of the triples in the loss; None weighs all alike.
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
        super().__init__(len(triples), plan, delivery)
        assert plan.candidates is not None
        self.triples, self.weights, self._mean_weight = triples, weights, mean_weight(weights)
        self.candidates, self.features = plan.candidates, plan.features
        self.sampler, known = self.candidates.sampler, self.candidates.known
        self.chunk_size = self.candidates.chunk_size or plan.batch_size
        self.device = device or torch.device("cpu")
        self.known = None if known is None else KnownFacts(known, self.device)
        self.resident: Tensor | None = None
        if device is not None:
            self._move(device)

    def _move(self, device: torch.device) -> None:
        """Copy triples, sampler and features to a device."""
        self.resident = torch.empty(len(self.triples), 3, dtype=torch.int32, device=device)
        for start in range(0, len(self.triples), CHUNK):
            part = slice(start, start + CHUNK)
            self.resident[part] = torch.from_numpy(self.triples[part].astype(np.int32))
        self.sampler = self.sampler.to(device)
        self.features = None if self.features is None else self.features.to(device)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Iterate over this rank's micro-batches of an epoch, from ``first_step`` on.

        On CUDA a thread makes a few batches ahead, on a stream of its own: the number of distinct
        ids has to be read from the device, and training shall not wait for it.
        """
        if self.device.type != "cuda":
            yield from super().epoch(epoch, first_step)
            return
        order, count = self.order(epoch), self.plan.accumulation
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # the triples are there

        def make(part: int) -> tuple[Batch, torch.cuda.Event]:
            with torch.cuda.stream(stream):
                batch = self.batch(order, epoch, *divmod(part, count))
                return batch, stream.record_event()

        parts = range(first_step * count, self.steps_per_epoch * count)
        with ThreadPoolExecutor(1) as pool:
            for batch, made in in_order(pool, AHEAD, make, parts):
                current = torch.cuda.current_stream(self.device)
                current.wait_event(made)
                batch.record_stream(current)
                yield batch

    def batch(self, order: Order, epoch: int, step: int, part: int = 0) -> Batch:
        """Return the batch of a step, or micro-batch ``part`` of it; it may be empty."""
        start, size = self.positions(epoch, step)
        share = share_of(size, self.chunk_size, *self._part(part))
        positions, inside = share.places()
        index = order(start + positions.reshape(-1))
        rows = self._triples_at(index)
        weight = inside.astype(np.float32) * (self.delivery.world_size / size)
        if self.weights is not None:
            weight *= (self.weights[index] / self._mean_weight).reshape(weight.shape)
        chunks = range(share.first_chunk, share.first_chunk + len(positions))
        sampler, rows_of = self.table_at(epoch, step)
        # Most samplers do not look at the triples of their chunks.
        triples = cache(partial(self._whole_chunks, order, start, size, chunks))
        parts, logs = [rows[:, 0], rows[:, 2]], []
        nothing = torch.zeros(0, dtype=torch.bool, device=self.device)
        known = {"head": nothing, "tail": nothing}
        for side in self.plan.sides:
            place, count = (epoch, step, side), self.candidates.numbers(side)
            numbers = self._there(random_numbers(self.plan.seed, place, chunks, count))
            drawn = Chunks(side, numbers, triples)
            candidates = sampler.sample(drawn)
            parts.append(candidates.reshape(-1))
            mask = self._excluded(sampler, drawn, rows, candidates) if len(chunks) else None
            if mask is not None:
                known[side] = mask.view(len(chunks), -1, candidates.shape[1])
            if self.candidates.log_q:
                logs.append(sampler.expected(drawn, candidates).log().float().view(-1))
        every = torch.cat(parts)
        every = every if rows_of is None else rows_of(every)
        return Batch(
            **lookup_of(every, self.features, self.delivery),
            relation=rows[:, 1].reshape(share.shape).contiguous(),
            weight=self._there(torch.from_numpy(weight)),
            known_head=known["head"],
            known_tail=known["tail"],
            sizes=tuple(map(len, parts)),
            log_expected=torch.cat(logs) if logs else torch.zeros(0, device=self.device),
        )

    def table_at(self, epoch: int, step: int) -> tuple[NegativeSampler, RowsOf | None]:
        """Return the sampler of a step, and what returns the rows of entities in its table.

        None where an entity's row has the entity's number.
        """
        return self.sampler, None

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

    def _excluded(
        self, sampler: NegativeSampler, chunks: Chunks, rows: Tensor, ids: Tensor
    ) -> Tensor | None:
        """Return which candidates (C, K) are no negatives: (C b, K) bool, or None for none."""
        mask = sampler.excluded(chunks, rows, ids)
        if self.known is not None:
            per_triple = ids.repeat_interleave(len(rows) // len(ids), 0)
            facts = self.known.contain(chunks.side, rows, per_triple)
            mask = facts if mask is None else mask | facts
        return mask
