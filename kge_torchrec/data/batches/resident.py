"""Batches of triples made on a device that holds all training triples: the same as by `triples`.

Order, candidates, known facts and distinct ids are computed where they are used, so that a GPU
does not wait for the CPU.  What has no form on the device (an order by weights, a sampler of
another package) is computed on the CPU and copied.

Shapes: T triples, C chunks, b triples per chunk, B = C b triples, K candidates per chunk and side.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config import Config
from kge_torchrec.data import SIDES, Side
from kge_torchrec.data.batches import BatchPlan, Delivery, as_feature, mean_weight
from kge_torchrec.data.batches.order import EpochShuffle, Order
from kge_torchrec.data.batches.triples import Bags, Batch, TripleBatches, share_of
from kge_torchrec.data.features import Features
from kge_torchrec.data.negatives import Chunks, numbers_on
from kge_torchrec.data.negatives_on_device import DeviceChunks, KnownFacts, on_device
from kge_torchrec.data.sort import CHUNK
from kge_torchrec.data.streams import in_order

_SHARE, _SHARE_OF_FREE = 1 / 8, 1 / 2  # of a GPU's memory, which triples may take
AHEAD = 2  # batches that a GPU makes while it trains on an earlier one


def device_bytes(config: Config, triples: int, entities: int = 0, pairs: int = 0) -> int:
    """Return the bytes of what makes batches on a device.

    Args:
        config: The config of the run.
        triples: T, which have ids, weights and keys of known facts.
        entities: Number of entities, if they have features.
        pairs: Number of pairs of an entity and a feature.
    """
    weighted = config.data.weights == "loss"
    of_triples = triples * (12 + 4 * weighted + 8 * config.negatives.filtered)
    return of_triples + Features.bytes_of(entities, pairs)


def fits_device(size: int, memory: float, free: float) -> bool:
    """Return whether train.batches auto puts triples of some bytes into the memory of a GPU."""
    return size <= min(memory * _SHARE, free * _SHARE_OF_FREE)


class ResidentBatches(TripleBatches):
    """Makes the batches of ``TripleBatches`` on a device.

    Args:
        device: Where triples are kept and batches made.
        triples, plan, delivery, weights: As for ``TripleBatches``.
    """

    def __init__(
        self,
        device: torch.device,
        triples: np.ndarray,
        plan: BatchPlan,
        delivery: Delivery | None = None,
        weights: np.ndarray | None = None,
    ):
        super().__init__(triples, plan, delivery, weights)
        self.device = device
        self._features = None if plan.features is None else plan.features.to(device)
        self._rows = torch.empty(len(triples), 3, dtype=torch.int32, device=device)
        self._shares: Tensor | None = None
        if weights is not None:
            self._shares = torch.empty(len(triples), device=device)
        for start in range(0, len(triples), CHUNK):
            part = slice(start, start + CHUNK)
            self._rows[part] = torch.from_numpy(np.asarray(triples[part]).astype(np.int32))
            if weights is not None and self._shares is not None:
                shares = (weights[part] / mean_weight(weights)).astype(np.float32)
                self._shares[part] = torch.from_numpy(shares)
        known = self.candidates.known
        self._known = None if known is None else KnownFacts(known, device)
        self._sampler = on_device(self.sampler, device)

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
        """Return the batch of a step, or micro-batch ``part`` of it, on the device."""
        assert isinstance(order, EpochShuffle)
        start, size = self.positions(epoch, step)
        share = share_of(size, self.chunk_size, *self._part(part))
        count, triples = share.shape
        places = torch.arange(share.begin, share.begin + count * triples, device=self.device)
        inside = (places >= share.start) & (places < share.stop)
        positions = start + places.clamp(share.start, max(share.start, share.stop - 1))
        index = order.of_tensor(positions)
        rows = self._rows[index].long()
        weight = inside.float() * (self.delivery.world_size / size)
        if self._shares is not None:
            weight *= self._shares[index]
        first = share.first_chunk
        chunks = range(first, first + count)
        load = cache(partial(self._chunks_on_device, order, start, size, chunks))
        on_host = partial(self._whole_chunks, order, start, size, first, count)
        parts, logs = [rows[:, 0], rows[:, 2]], []
        known = {side: inside.new_empty(0) for side in SIDES}
        for side in self.plan.sides:
            width, place = self.candidates.numbers(side), (epoch, step, side)
            numbers = numbers_on(self.device, self.plan.seed, place, chunks, width)
            drawn = DeviceChunks(
                side, numbers, self.chunk_size, load, partial(_on_host, side, numbers, on_host)
            )
            candidates = self._sampler.sample(drawn)
            parts.append(candidates.reshape(-1))
            mask = self._no_negatives(drawn, rows, candidates) if count else None
            if mask is not None:
                known[side] = mask.view(count, -1, candidates.shape[1])
            if self.candidates.log_q:
                logs.append(self._sampler.log_expected(drawn, candidates).reshape(-1))
        every = torch.cat(parts)
        unique = entities = every
        if self.delivery.deduplicate:
            unique, entities = torch.unique(every, return_inverse=True)
        looked_up, bags = Bags.of(self._features, unique, self.delivery.deduplicate)
        return Batch(
            ids=as_feature(looked_up, self.delivery.bags),
            entities=entities,
            relation=rows[:, 1].reshape(share.shape),
            weight=weight.view(share.shape),
            known_head=known["head"],
            known_tail=known["tail"],
            sizes=tuple(map(len, parts)),
            log_expected=torch.cat(logs) if logs else weight.new_empty(0),
            deduplicated=self.delivery.deduplicate,
            bags=bags,
        )

    def _chunks_on_device(
        self, order: EpochShuffle, start: int, size: int, chunks: range
    ) -> Tensor:
        """Return what ``_whole_chunks`` returns, on the device."""
        width = self.chunk_size
        begin = torch.arange(chunks.start, chunks.stop, device=self.device)[:, None] * width
        length = (size - begin).clamp(max=width)
        places = begin + torch.arange(width, device=self.device) % length
        index = order.of_tensor(start + places.reshape(-1))
        return self._rows[index].long().view(len(chunks), width, 3)

    def _no_negatives(self, chunks: DeviceChunks, rows: Tensor, ids: Tensor) -> Tensor | None:
        """Return which candidates (C, K) are no negatives: (B, K) bool, or None for none."""
        mask = self._sampler.excluded(chunks, rows, ids)
        if self._known is not None:
            per_triple = ids.repeat_interleave(len(rows) // len(ids), 0)
            facts = self._known.contain(chunks.side, rows, per_triple)
            mask = facts if mask is None else mask | facts
        return mask


def _on_host(side: Side, numbers: Tensor, load: partial[np.ndarray]) -> Chunks:
    return Chunks(side, numbers.cpu().numpy(), load)
