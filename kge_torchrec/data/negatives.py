"""Negative samplers: which entities a triple is compared with.

A sampler turns random numbers into candidates, on the device that makes the batches.  The numbers
are a function of (seed, epoch, step, side, chunk), never of the world size: ranks that share a
chunk sample the same candidates.  Every sampler keeps to the contract of ``NegativeSampler``: those
of this file and of ``typed_negatives``, and those of other packages
(docs/how-to/write-your-own-parts.md).

Shapes: N entities, C chunks, b triples per chunk, B = C b triples, K candidates per chunk,
M numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kge_torchrec.config.checks import ConfigError, NonNegativeFloat
from kge_torchrec.config.registry import construct
from kge_torchrec.data import RELATION, SIDES, Side, answer_column
from kge_torchrec.data.store.filter_index import FilterIndex, keys_of
from kge_torchrec.kernels.library import arrays
from kge_torchrec.kernels.operators import IMPLEMENTATION

if TYPE_CHECKING:
    from kge_torchrec.data.store import TripleStore

_STREAM = 1  # separates candidates from the epoch order, whose key is (epoch,)
_PER_COUNTER = 4  # 64-bit words that Philox gives per counter value
BELOW_ONE = float(np.nextafter(1.0, 0.0))


def random_numbers(seed: int, place: tuple[int, int, Side], chunks: range, count: int) -> Tensor:
    """Return the random numbers in [0, 1) from which the candidates of chunks are sampled.

    Philox 4x64-10 (Salmon et al. 2011) makes them from a counter, so jumping to a chunk costs
    nothing.

    Args:
        seed: Seed of the run.
        place: Epoch, step and side.
        chunks: Numbers of the chunks within the step.
        count: Random numbers per chunk.

    Returns:
        (len(chunks), count) float64, on the CPU.
    """
    epoch, step, side = place
    blocks = -(-count // _PER_COUNTER)
    counter = np.array([chunks.start * blocks, step, SIDES.index(side), 0], np.uint64)
    philox = np.random.Philox(key=_key_of_epoch(seed, epoch), counter=counter)
    words = philox.random_raw(len(chunks) * blocks * _PER_COUNTER)
    numbers = (words >> np.uint64(11)) * 2.0**-53  # 53 bits are exact
    return torch.from_numpy(numbers.reshape(len(chunks), blocks * _PER_COUNTER)[:, :count])


@lru_cache(maxsize=4)  # it takes as long as hundreds of numbers
def _key_of_epoch(seed: int, epoch: int) -> np.ndarray:
    return np.random.SeedSequence(seed, spawn_key=(epoch, _STREAM)).generate_state(2, np.uint64)


@dataclass(frozen=True)
class Chunks:
    """The input of a sampler: chunks of triples of one side.

    The triples of a chunk share their candidates.  Chunks are whole, the same on every rank that
    trains a part of them; a chunk that the end of the step cuts short has its triples repeated.

    Args:
        side: The side that is corrupted, "head" or "tail".
        numbers: (C, K) float64 random numbers in [0, 1).
        load: Returns the triples (C, b, 3) int64; None where queries share their candidates.
    """

    side: Side
    numbers: Tensor
    load: Callable[[], Tensor] | None = None

    @property
    def triples(self) -> Tensor:
        """(C, b, 3) int64, columns head, relation, tail; read only when a sampler wants them."""
        assert self.load is not None, "queries of a batch share their candidates"
        return self.load()


class NegativeSampler:
    """Base of samplers: turns random numbers, and triples if it likes, into candidates.

    A sampler has no random numbers of its own.  As the numbers and the chunks are a function of the
    position in training, so are the candidates, on any number of ranks.

    All tensors are on the device that makes the batches, where ``to`` moves those of the sampler.
    """

    device = torch.device("cpu")
    on_cpu = False  # True: batches are made on the CPU, since the sampler works only there

    @dataclass(frozen=True)
    class Options:
        """Settings: keys of ``negatives`` of the same name, and of ``negatives.options``."""

    @classmethod
    def of(cls, store: TripleStore, options: Any) -> NegativeSampler:
        """Return the sampler for a graph; by default constructed with both arguments."""
        return construct("negative_sampler", cls, store, options)

    @classmethod
    def frequency_power(cls, options: Any) -> float | None:
        """Return the power of an entity's frequency that its probability is in proportion to.

        The planner estimates the rows per step with it.  None, the default, is uniform.
        """
        return None

    def to(self, device: torch.device) -> NegativeSampler:
        """Return the same sampler on a device, with the tensors and samplers that it holds."""
        moved = copy.copy(self)
        moved.device = device
        for name, value in vars(self).items():
            if isinstance(value, Tensor | NegativeSampler):
                setattr(moved, name, value.to(device))
        return moved

    def sample(self, chunks: Chunks) -> Tensor:
        """Return the candidates of chunks: (C, K) int64, one for each random number.

        The candidates of a chunk are a function of its random numbers and triples only.
        """
        raise NotImplementedError

    def excluded(self, chunks: Chunks, triples: Tensor, candidates: Tensor) -> Tensor | None:
        """Return which candidates are no negatives of a triple, although its chunk has them.

        Args:
            chunks: The chunks.
            triples: (B, 3) int64, this rank's triples, chunk by chunk, B / C of each.
            candidates: (C, K) int64, those of ``sample``; with ``negatives.in_batch``, the answers
                of the chunk follow.

        Returns:
            (B, K) bool, True for candidates that do not count, or None where all of them count.
        """
        return None

    def expected(self, chunks: Chunks, ids: Tensor) -> Tensor:
        """Return how often a chunk is expected to have each of some candidates, ids (C, K) int64.

        ``negatives.log_q`` needs it: (C, K) float64.
        """
        raise ConfigError(
            f"negatives.log_q: {type(self).__name__} does not say how likely each entity is; give "
            "it a method expected, or set negatives.log_q to false"
        )


class UniformSampler(NegativeSampler):
    """Samples all entities alike."""

    def __init__(self, num_entities: int):
        self.num_entities = num_entities

    @classmethod
    def of(cls, store: TripleStore, options: Any) -> UniformSampler:
        return cls(store.num_entities)

    def sample(self, chunks: Chunks) -> Tensor:
        return (chunks.numbers * self.num_entities).long()

    def expected(self, chunks: Chunks, ids: Tensor) -> Tensor:
        count = chunks.numbers.shape[1]
        return torch.full_like(ids, count / self.num_entities, dtype=torch.float64)


class DegreeSampler(NegativeSampler):
    """Samples entities in proportion to degree ** power (Mikolov et al. 2013).

    Weights are whole numbers, so that every device adds them up to the same sums, of 8 bytes per
    entity.  Entities without a training triple are never sampled.

    Args:
        degrees: (N,) training triples that have each entity.
        power: Exponent of the degree.
    """

    @dataclass(frozen=True)
    class Options:
        """The weights."""

        degree_power: NonNegativeFloat = 0.75
        """Exponent of an entity's degree."""

    @classmethod
    def of(cls, store: TripleStore, options: Options) -> DegreeSampler:
        return cls(store.degrees(), options.degree_power)

    @classmethod
    def frequency_power(cls, options: Options) -> float:
        return options.degree_power

    def __init__(self, degrees: np.ndarray, power: float):
        weights = np.zeros(len(degrees))
        np.power(degrees, float(power), where=degrees > 0, out=weights)
        total = weights.sum()
        if not total > 0:
            raise ValueError("negatives cannot be sampled by degree: no entity is in a triple")
        weights *= 2.0**50 / total  # with room for the entities whose weight is made 1
        np.maximum(weights, 1, where=degrees > 0, out=weights)
        self.sums = torch.from_numpy(np.cumsum(weights.astype(np.int64)))
        self._total = int(self.sums[-1])

    def sample(self, chunks: Chunks) -> Tensor:
        return torch.searchsorted(self.sums, (chunks.numbers * self._total).long(), right=True)

    def expected(self, chunks: Chunks, ids: Tensor) -> Tensor:
        before = torch.where(ids > 0, self.sums[ids - 1], 0)
        return chunks.numbers.shape[1] * (self.sums[ids] - before).double() / self._total


class InBatchSampler(NegativeSampler):
    """Adds the answers of a chunk's triples to the candidates of another sampler.

    Args:
        others: The other sampler.
        degrees: By side, (N,) training triples that have an entity there; only ``expected`` needs
            them.
        same_relation: Whether only answers of triples with the same relation are negatives, as in
            TwHIN (El-Kishky et al. 2022).
    """

    def __init__(
        self,
        others: NegativeSampler,
        degrees: Mapping[Side, np.ndarray] | None = None,
        same_relation: bool = False,
    ):
        self.others, self.same_relation = others, same_relation
        if degrees is not None:
            self.head, self.tail = (torch.tensor(degrees[side]) for side in SIDES)
            self._triples = int(self.head.sum())

    def sample(self, chunks: Chunks) -> Tensor:
        answers = chunks.triples[..., answer_column(chunks.side)]
        return torch.cat([self.others.sample(chunks), answers], 1)

    def excluded(self, chunks: Chunks, triples: Tensor, candidates: Tensor) -> Tensor | None:
        excluded = self.others.excluded(chunks, triples, candidates)
        if not self.same_relation:
            return excluded
        answers = chunks.triples[:, None, :, RELATION]  # of the last candidates, (C, 1, b)
        relations = triples[:, RELATION].view(len(answers), -1, 1)
        other = (answers != relations).view(len(triples), -1)
        if excluded is None:
            return pad(other, (candidates.shape[1] - other.shape[1], 0))
        excluded[:, -other.shape[1] :] |= other
        return excluded

    def expected(self, chunks: Chunks, ids: Tensor) -> Tensor:
        """Return the sum of both expectations: the proposals are one mixture.

        A chunk of b triples has b - 1 others than the query's own, out of T - 1.  The share of an
        item is the sampling probability of Yi et al. 2019, counted and not estimated in a stream.
        """
        degrees = self.head if chunks.side == "head" else self.tail
        others = chunks.triples.shape[1] - 1
        in_batch = others / max(1, self._triples - 1) * degrees[ids].double()
        return self.others.expected(chunks, ids) + in_batch


class FilteredSampler(NegativeSampler):
    """Excludes candidates of another sampler that make known facts.

    Other devices than a CPU hold at most 16 bytes per fact.

    Args:
        others: The other sampler.
        known: The facts, of one split.
    """

    def __init__(self, others: NegativeSampler, known: FilterIndex):
        self.others, self._known = others, known

    def sample(self, chunks: Chunks) -> Tensor:
        return self.others.sample(chunks)

    def expected(self, chunks: Chunks, ids: Tensor) -> Tensor:
        return self.others.expected(chunks, ids)

    def excluded(self, chunks: Chunks, triples: Tensor, candidates: Tensor) -> Tensor:
        head, relation, tail = triples.unbind(1)
        anchor = head if chunks.side == "tail" else tail
        if IMPLEMENTATION["ids"](candidates) == "numba":
            known = self._known.contains(chunks.side, *arrays(anchor, relation, candidates))
            facts = torch.from_numpy(known)
        else:
            heads = tails = candidates.repeat_interleave(len(triples) // len(candidates), 0)
            if chunks.side == "tail":
                heads = head[:, None]
            else:
                tails = tail[:, None]
            query, is_query = places_among(self._queries, (heads << 32) | relation[:, None])
            facts = is_query & places_among(self._facts, (query << 32) | tails)[1]
        others = self.others.excluded(chunks, triples, candidates)
        return facts if others is None else facts | others

    @cached_property
    def _queries(self) -> Tensor:
        """(Q,) ascending, the keys of queries for tails."""
        return torch.tensor(self._known.side_index("tail").queries, device=self.device)

    @cached_property
    def _facts(self) -> Tensor:
        """(T,) ascending, a place in ``_queries`` << 32 | tail for each fact."""
        _, starts, answers = self._known.side_index("tail")
        queries = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        return torch.from_numpy(keys_of(queries, answers)).to(self.device)


def places_among(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return a place of each number among ascending keys (M,), M > 0, and whether it is there."""
    place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    return place, keys[place] == wanted
