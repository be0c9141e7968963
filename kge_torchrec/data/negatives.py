"""Negative samplers: which entities a triple is compared with.

A sampler turns random numbers into candidates, on the device that makes the batches.  The numbers
are a function of (seed, epoch, step, side, chunk), never of the world size: ranks that share a
chunk sample the same candidates.

Shapes: N entities, C chunks, b triples per chunk, B = C b triples, K candidates per chunk,
M members.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kge_torchrec.config.checks import ConfigError, NonNegativeFloat
from kge_torchrec.config.data import NegativesConfig
from kge_torchrec.config.registry import construct
from kge_torchrec.data import OTHER, RELATION, SIDES, Side, answer_column
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import FilterIndex, anchors_of, keys_of, relations_of
from kge_torchrec.data.types import types_of
from kge_torchrec.kernels.library import arrays
from kge_torchrec.kernels.operators import IMPLEMENTATION, distinct

_STREAM = 1  # separates candidates from the epoch order, whose key is (epoch,)
_PER_COUNTER = 4  # 64-bit words that Philox gives per counter value
BELOW_ONE = float(np.nextafter(1.0, 0.0))


def random_numbers(seed: int, place: tuple[int, int, Side], chunks: range, count: int) -> Tensor:
    """Return ``count`` random numbers in [0, 1) for each of some chunks: (C, count) float64.

    ``place`` is epoch, step and side.  Philox 4x64-10 (Salmon et al. 2011) makes the numbers from a
    counter, so jumping to a chunk costs nothing.
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
    """The input of a sampler: chunks of triples that share their candidates.

    Chunks are whole, the same on every rank that trains a part of them; a chunk that the end of the
    step cuts short has its triples repeated.
    """

    side: Side  # that is corrupted
    numbers: Tensor  # (C, K) float64 random numbers in [0, 1)
    load: Callable[[], Tensor] | None = None  # None where queries share their candidates

    @property
    def triples(self) -> Tensor:
        """(C, b, 3) int64, columns head, relation, tail; read only when a sampler wants them."""
        assert self.load is not None, "queries of a batch share their candidates"
        return self.load()


class NegativeSampler:
    """Base of samplers: turns random numbers, and triples if it likes, into candidates.

    A sampler has no random numbers of its own.  All tensors are on the device that makes the
    batches, where ``to`` moves those of the sampler.
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

        The planner estimates the rows per step with it.  None is uniform.
        """
        return None

    def to(self, device: torch.device) -> NegativeSampler:
        """Return the sampler on a device, with the tensors and samplers that it holds."""
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
        weights *= 2.0**50 / weights.sum()  # with room for the entities whose weight is made 1
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

    With ``same_relation``, only answers of triples with the same relation are negatives, as in
    TwHIN (El-Kishky et al. 2022).  ``degrees`` (N,) by side are needed by ``expected`` only.
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
    """Excludes candidates of another sampler that make known facts, of one split.

    Other devices than a CPU hold at most 16 bytes per fact.
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


class TypedSampler(NegativeSampler):
    """Takes the first candidates of a chunk from entities of a kind: of a type, say.

    Each of them is sampled for one triple of the chunk, chosen at random, and counts for the
    triples of its kind.  A triple whose kind has no other entity takes those of ``others``.

    Args:
        others: Sampler of all other candidates.
        share: Share of a chunk's sampled candidates that are of a kind.
        members: (M,) ascending `filter_index.keys_of` a kind and each of its entities.
        kinds: Number of kinds.
    """

    def __init__(self, others: NegativeSampler, share: float, members: np.ndarray, kinds: int):
        self.others, self.share = others, share
        self.starts = torch.from_numpy(np.searchsorted(members, np.arange(kinds + 1) << 32))
        self.members = torch.from_numpy(relations_of(members).astype(np.int32))  # half the cache

    def kinds_of(self, side: Side, triples: Tensor) -> Tensor:
        """Return the kinds (M,) of entities on a side of triples (M, 3)."""
        raise NotImplementedError

    def sample(self, chunks: Chunks) -> Tensor:
        ids, triples, typed = self.others.sample(chunks), chunks.triples, self._typed(chunks)
        if not len(triples):
            return ids
        # The whole part of a number times b, which is below b, chooses a triple; the rest chooses
        # an entity for it.
        rest = chunks.numbers[:, :typed] * triples.shape[1]
        place = rest.long()
        rest -= place
        chunk = torch.arange(len(triples), device=place.device)[:, None]
        kind = self.kinds_of(chunks.side, triples[chunk, place].flatten(0, 1))
        first = self.starts.index_select(0, kind)
        count = self.starts.index_select(0, kind + 1) - first
        place = first + (rest.view(-1) * count).long()
        chosen = self.members.index_select(0, place.clamp_(max=len(self.members) - 1)).long()
        ids[:, :typed] = torch.where(count > 1, chosen, ids[:, :typed].reshape(-1)).view(rest.shape)
        return ids

    def excluded(self, chunks: Chunks, triples: Tensor, candidates: Tensor) -> Tensor | None:
        """Return which candidates are not of a triple's kind.

        Answers of the batch, which follow the sampled candidates, have to be of the kind where all
        sampled candidates have to be.
        """
        typed = candidates if self.share == 1 else candidates[:, : self._typed(chunks)].contiguous()
        kind = self.kinds_of(chunks.side, triples)
        chunk = torch.arange(len(candidates), device=kind.device)
        chunk = chunk.repeat_interleave(len(triples) // len(candidates))
        # Compare once for all triples of a chunk that have the same kind.
        unique, place = distinct(chunk * len(self.starts) + kind)
        chunk, kind = unique // len(self.starts), unique % len(self.starts)
        count = self.starts[kind + 1] - self.starts[kind]
        fits = self._are_members(kind, typed, chunk).logical_or_((count <= 1)[:, None])
        excluded = fits.logical_not_()
        excluded = pad(excluded, (0, candidates.shape[1] - typed.shape[1])).index_select(0, place)
        others = self.others.excluded(chunks, triples, candidates)
        return excluded if others is None else excluded | others

    def _typed(self, chunks: Chunks) -> int:
        """Return how many of the sampled candidates of a chunk are of a kind."""
        return max(1, round(self.share * chunks.numbers.shape[1]))

    def _are_members(self, kind: Tensor, candidates: Tensor, chunk: Tensor) -> Tensor:
        """Return which candidates (C, K) of chunks (B,) are of one kind each (B,): (B, K) bool."""
        if IMPLEMENTATION["ids"](candidates) == "numba":
            from kge_torchrec.data.store.search import mark_members  # loads slowly

            found = torch.zeros(len(kind), candidates.shape[1], dtype=torch.bool)
            ends = self.starts[kind], self.starts[kind + 1]
            mark_members(*arrays(self.members, *ends, candidates, chunk, found))
            return found
        return places_among(self._keys, (kind[:, None] << 32) | candidates[chunk])[1]

    @cached_property
    def _keys(self) -> Tensor:
        """(M,) ascending, a kind << 32 | entity for each member."""
        kinds = torch.arange(len(self.starts) - 1, device=self.starts.device)
        return (kinds.repeat_interleave(self.starts.diff()) << 32) | self.members


class SeenSampler(TypedSampler):
    """Takes entities that the triple's relation has on that side in train.

    This is the local closed-world assumption of Krompass et al. 2015.
    """

    def __init__(self, others: NegativeSampler, share: float, store: TripleStore):
        members, self._relations = [], store.num_relations
        for number, side in enumerate(SIDES):
            # Tails are the anchors of the index for heads, and the other way round.
            queries = store.side_index("train", OTHER[side]).queries
            kind = relations_of(queries) + number * self._relations
            members.append(np.sort(keys_of(kind, anchors_of(queries))))
        super().__init__(others, share, np.concatenate(members), 2 * self._relations)

    def kinds_of(self, side: Side, triples: Tensor) -> Tensor:
        return triples[:, RELATION] + SIDES.index(side) * self._relations


class TypeSampler(TypedSampler):
    """Takes entities of the type of the triple's own entity; of several, the rarest it shares."""

    def __init__(self, others: NegativeSampler, share: float, store: TripleStore):
        types = types_of(store)
        count, entities = len(types.names), types.entities
        super().__init__(others, share, np.sort(keys_of(types.ids, entities)), count + 1)
        sizes = self.starts.diff().numpy()
        order = np.argsort(-np.where(sizes > 1, sizes, np.inf)[types.ids], kind="stable")
        own = np.full(store.num_entities, count)  # a kind without members
        own[entities[order]] = types.ids[order]  # the last one of an entity stays
        self.own = torch.from_numpy(own)

    def kinds_of(self, side: Side, triples: Tensor) -> Tensor:
        return self.own.index_select(0, triples[:, answer_column(side)])


def typed_sampler(
    others: NegativeSampler, config: NegativesConfig, store: TripleStore
) -> NegativeSampler:
    """Return the sampler that negatives.among names; DataError if the store lacks types."""
    kind = SeenSampler if config.among == "seen" else TypeSampler
    return kind(others, config.among_share, store)


def places_among(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return a place of each number among ascending keys (M,), M > 0, and whether it is there."""
    place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    return place, keys[place] == wanted
