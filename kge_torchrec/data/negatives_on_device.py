"""The samplers of `negatives` and `typed_negatives` on a device: the same candidates from tensors.

``on_device`` translates a sampler.  One that it does not know (of another package, of entities with
several types) samples on the CPU, and its candidates are copied.

Shapes: N entities, C chunks, b triples per chunk, B = C b triples, K candidates per chunk,
M numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import RELATION, SIDES, Side, answer_column
from kge_torchrec.data.negatives import (
    Chunks,
    DegreeSampler,
    InBatchSampler,
    NegativeSampler,
    UniformSampler,
)
from kge_torchrec.data.store.filter_index import FilterIndex, keys_of
from kge_torchrec.data.typed_negatives import SeenSampler, TypedSampler, TypeSampler

BELOW_ONE = float(np.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class DeviceChunks:
    """`Chunks` on a device.

    Args:
        side: The side that is corrupted.
        numbers: (C, K) float64.
        size: b.
        load: Returns the triples (C, b, 3) int64.
        on_host: The same chunks on the CPU; they are made when something is read from them.
    """

    side: Side
    numbers: Tensor
    size: int
    load: Callable[[], Tensor]
    on_host: Callable[[], Chunks]


class DeviceSampler:
    """Base: the methods of ``NegativeSampler`` on tensors of one device."""

    def sample(self, chunks: DeviceChunks) -> Tensor:
        """Return the candidates (C, K) int64."""
        raise NotImplementedError

    def excluded(self, chunks: DeviceChunks, triples: Tensor, candidates: Tensor) -> Tensor | None:
        """Return which candidates (C, K) are no negatives of triples (B, 3): (B, K) bool."""
        return None

    def log_expected(self, chunks: DeviceChunks, candidates: Tensor) -> Tensor:
        """Return the log of how often a chunk is expected to have candidates, (C, K) float32."""
        raise NotImplementedError


class OnHost(DeviceSampler):
    """Samples on the CPU.

    Args:
        sampler: The sampler.
        device: Where the candidates are wanted.
    """

    def __init__(self, sampler: NegativeSampler, device: torch.device):
        self._sampler, self._device = sampler, device

    def sample(self, chunks: DeviceChunks) -> Tensor:
        return self._there(self._sampler.sample(chunks.on_host()))

    def excluded(self, chunks: DeviceChunks, triples: Tensor, candidates: Tensor) -> Tensor | None:
        if type(self._sampler).excluded is NegativeSampler.excluded:
            return None
        arrays = (x.cpu().numpy() for x in (triples, candidates))
        mask = self._sampler.excluded(chunks.on_host(), *arrays)
        return None if mask is None else self._there(mask)

    def log_expected(self, chunks: DeviceChunks, candidates: Tensor) -> Tensor:
        expected = self._sampler.expected(chunks.on_host(), candidates.cpu().numpy())
        return self._there(np.log(expected).astype(np.float32))

    def _there(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


class OnDevice(DeviceSampler):
    """Base of translated samplers.

    Args:
        sampler: The sampler.
        device: Where its tables are.
    """

    def __init__(self, sampler: NegativeSampler, device: torch.device):
        self._sampler, self.device = sampler, device
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def log_expected(self, chunks: DeviceChunks, candidates: Tensor) -> Tensor:
        """Look the logs up: they are a function of the entity, the side and the chunk's size."""
        sizes = SIDES.index(chunks.side), chunks.numbers.shape[1], chunks.size
        if sizes not in self._tables:
            alike = Chunks(
                chunks.side,
                np.empty((1, sizes[1])),
                lambda: np.empty((1, sizes[2], 3), np.int64),
            )
            every = np.arange(_entities_of(self._sampler))[None]
            with np.errstate(divide="ignore"):  # some are never sampled
                logs = np.log(self._sampler.expected(alike, every)).astype(np.float32)
            self._tables[sizes] = torch.from_numpy(logs[0]).to(self.device)
        return self._tables[sizes][candidates]


class UniformOnDevice(OnDevice):
    """``UniformSampler`` on a device."""

    _sampler: UniformSampler

    def sample(self, chunks: DeviceChunks) -> Tensor:
        return (chunks.numbers * self._sampler.num_entities).long()


class DegreeOnDevice(OnDevice):
    """``DegreeSampler`` on a device, with the sum of weights up to every entity (8 N bytes)."""

    _sampler: DegreeSampler

    def __init__(self, sampler: DegreeSampler, device: torch.device):
        super().__init__(sampler, device)
        self._sums = torch.from_numpy(sampler.cumulative()).to(device)
        self._total = float(self._sums[-1])

    def sample(self, chunks: DeviceChunks) -> Tensor:
        targets = chunks.numbers * self._total
        targets.clamp_(max=float(np.nextafter(self._total, 0.0)))
        return torch.searchsorted(self._sums, targets, right=True)


class InBatchOnDevice(OnDevice):
    """``InBatchSampler`` on a device."""

    _sampler: InBatchSampler

    def __init__(self, sampler: InBatchSampler, device: torch.device):
        super().__init__(sampler, device)
        self._others = on_device(sampler.sampler, device)

    def sample(self, chunks: DeviceChunks) -> Tensor:
        answers = chunks.load()[..., answer_column(chunks.side)]
        return torch.cat([self._others.sample(chunks), answers], 1)

    def excluded(self, chunks: DeviceChunks, triples: Tensor, candidates: Tensor) -> Tensor | None:
        excluded = self._others.excluded(chunks, triples, candidates)
        if not self._sampler.same_relation:
            return excluded
        others = triples.new_zeros(len(triples), candidates.shape[1], dtype=torch.bool)
        answers = chunks.load()[..., RELATION]
        per_triple = answers.repeat_interleave(len(triples) // len(answers), 0)
        others[:, -answers.shape[1] :] = per_triple != triples[:, RELATION, None]
        return others if excluded is None else excluded | others


class TypedOnDevice(OnDevice):
    """Base of ``TypedSampler`` on a device."""

    _sampler: TypedSampler

    def __init__(self, sampler: TypedSampler, device: torch.device):
        super().__init__(sampler, device)
        self._others = on_device(sampler.others, device)

    def choose(self, side: Side, triples: Tensor, numbers: Tensor) -> Tensor:
        """Return one entity for each triple (M, 3) and number (M,): (M,), -1 for none."""
        raise NotImplementedError

    def fits(self, side: Side, triples: Tensor, candidates: Tensor) -> Tensor:
        """Return whether candidates (B, K) are of the kind for triples (B, 3): (B, K) bool."""
        raise NotImplementedError

    def sample(self, chunks: DeviceChunks) -> Tensor:
        ids, triples = self._others.sample(chunks), chunks.load()
        if not len(triples):
            return ids
        count = self._sampler.typed(chunks.numbers.shape[1])
        places = chunks.numbers[:, :count] * triples.shape[1]
        place = places.long().clamp_(max=triples.shape[1] - 1)
        chosen = triples.gather(1, place[..., None].expand(-1, -1, 3)).reshape(-1, 3)
        rest = (places - place).clamp_(0, BELOW_ONE)
        typed = self.choose(chunks.side, chosen, rest.reshape(-1)).view(place.shape)
        ids[:, :count] = torch.where(typed >= 0, typed, ids[:, :count])
        return ids

    def excluded(self, chunks: DeviceChunks, triples: Tensor, candidates: Tensor) -> Tensor | None:
        typed = candidates
        if self._sampler.share != 1:
            typed = candidates[:, : self._sampler.typed(chunks.numbers.shape[1])]
        excluded = triples.new_zeros(len(triples), candidates.shape[1], dtype=torch.bool)
        rows = typed.repeat_interleave(len(triples) // len(candidates), 0)
        excluded[:, : typed.shape[1]] = ~self.fits(chunks.side, triples, rows)
        others = self._others.excluded(chunks, triples, candidates)
        return excluded if others is None else excluded | others


class SeenOnDevice(TypedOnDevice):
    """``SeenSampler`` on a device, with 12 bytes per distinct entity of a relation and side."""

    _sampler: SeenSampler

    def __init__(self, sampler: SeenSampler, device: torch.device):
        super().__init__(sampler, device)
        self._seen = {}
        for side, (starts, entities) in sampler.seen.items():
            ids = torch.from_numpy(entities.astype(np.int64))
            relations = torch.from_numpy(np.diff(starts)).cumsum(0)
            relation = torch.bucketize(torch.arange(len(ids)), relations, right=True)
            keys = relation * (1 << 32) + ids
            self._seen[side] = [x.to(device) for x in (torch.from_numpy(starts), ids, keys)]

    def choose(self, side: Side, triples: Tensor, numbers: Tensor) -> Tensor:
        starts, entities, _ = self._seen[side]
        start, count = self._range(starts, triples)
        place = start + (numbers * count).long()
        return torch.where(count > 1, entities[place.clamp_(max=len(entities) - 1)], -1)

    def fits(self, side: Side, triples: Tensor, candidates: Tensor) -> Tensor:
        starts, _, keys = self._seen[side]
        wanted = triples[:, RELATION, None] * (1 << 32) + candidates
        return _places(keys, wanted)[1] | (self._range(starts, triples)[1] <= 1)[:, None]

    @staticmethod
    def _range(starts: Tensor, triples: Tensor) -> tuple[Tensor, Tensor]:
        start = starts[triples[:, RELATION]]
        return start, starts[triples[:, RELATION] + 1] - start


class TypeOnDevice(TypedOnDevice):
    """``TypeSampler`` on a device, for entities that have at most one type each."""

    _sampler: TypeSampler

    def __init__(self, sampler: TypeSampler, device: torch.device):
        super().__init__(sampler, device)
        sizes = np.bincount(sampler.types.types, minlength=len(sampler.types))
        counts = np.diff(sampler.types.indptr)
        of_entity = np.full(len(counts), len(sizes))
        of_entity[counts > 0] = sampler.types.types
        tables = of_entity, sampler.members, sampler.starts, np.append(sizes, 0)
        self._types, self._members, self._starts, self._sizes = (
            torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(device) for x in tables
        )

    def choose(self, side: Side, triples: Tensor, numbers: Tensor) -> Tensor:
        kind = self._types[triples[:, answer_column(side)]]
        size = self._sizes[kind]
        start = self._starts[kind.clamp(max=len(self._starts) - 1)]
        place = (start + (numbers * size).long()).clamp_(max=len(self._members) - 1)
        return torch.where(size > 1, self._members[place], -1)

    def fits(self, side: Side, triples: Tensor, candidates: Tensor) -> Tensor:
        kind = self._types[triples[:, answer_column(side)]][:, None]
        return (self._types[candidates] == kind) | (self._sizes[kind] <= 1)


class KnownFacts:
    """The facts of a filter index on a device, in at most 16 bytes per triple.

    Args:
        index: The filter index, of one split.
        device: Where the facts are.
    """

    def __init__(self, index: FilterIndex, device: torch.device):
        queries, starts, answers = index.side_index("tail")
        numbers = np.repeat(np.arange(len(queries)), np.diff(starts))
        self._queries = torch.from_numpy(np.array(queries)).to(device)
        self._facts = torch.from_numpy(keys_of(numbers, answers)).to(device)

    def contain(self, side: Side, triples: Tensor, candidates: Tensor) -> Tensor:
        """Return which candidates (B, K) make known facts of triples (B, 3): (B, K) bool."""
        head, relation, tail = (triples[:, [column]] for column in range(3))
        if side == "tail":
            tail = candidates
        else:
            head = candidates
        query, is_query = _places(self._queries, (head << 32) | relation)
        return is_query & _places(self._facts, (query << 32) | tail)[1]


def _places(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return a place of each number among ascending ones, and whether it is there."""
    if not len(keys):
        return wanted, torch.zeros_like(wanted, dtype=torch.bool)
    place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    return place, keys[place] == wanted


def _entities_of(sampler: NegativeSampler) -> int:
    """Return N of a sampler that ``on_device`` translates."""
    while isinstance(sampler, TypedSampler | InBatchSampler):
        sampler = sampler.others if isinstance(sampler, TypedSampler) else sampler.sampler
    if isinstance(sampler, UniformSampler):
        return sampler.num_entities
    assert isinstance(sampler, DegreeSampler)
    return len(sampler.degrees)


_TRANSLATED: dict[type[NegativeSampler], type[OnDevice]] = {
    UniformSampler: UniformOnDevice,
    DegreeSampler: DegreeOnDevice,
    InBatchSampler: InBatchOnDevice,
    SeenSampler: SeenOnDevice,
    TypeSampler: TypeOnDevice,
}


def on_device(sampler: NegativeSampler, device: torch.device) -> DeviceSampler:
    """Return a sampler on a device; one without translation samples on the CPU."""
    kind = _TRANSLATED.get(type(sampler))
    if isinstance(sampler, TypeSampler) and np.diff(sampler.types.indptr).max() > 1:
        kind = None
    return OnHost(sampler, device) if kind is None else kind(sampler, device)
