"""Negative samplers: which entities a triple is compared with.

A sampler turns random numbers into candidates.  The numbers are a function of (seed, epoch, step,
side, chunk), never of the world size: ranks that share a chunk sample the same candidates.  Every
sampler keeps to the contract of ``NegativeSampler``: those of this file, those of
`typed_negatives`, and those of other packages (docs/how-to/write-your-own-parts.md).

Shapes: N entities, C chunks, b triples per chunk, B = C b triples, K candidates per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config.checks import ConfigError, not_negative
from kge_torchrec.config.registry import construct_class
from kge_torchrec.data import RELATION, SIDES, Side, answer_column
from kge_torchrec.kernels.jit import helper, kernel
from kge_torchrec.kernels.random_formulas import PER_COUNTER, numpy_numbers
from kge_torchrec.kernels.random_streams import philox_numbers

if TYPE_CHECKING:
    from kge_torchrec.data.store import TripleStore

_STREAM = 1  # separates candidates from the epoch order, whose key is (epoch,)


def random_numbers(
    seed: int, place: tuple[int, int, Side], chunks: range, count: int
) -> np.ndarray:
    """Return the random numbers in [0, 1) from which the candidates of chunks are sampled.

    Philox is a counter-based generator (Salmon et al. 2011), so jumping to a chunk costs nothing,
    and every device makes the same numbers.

    Args:
        seed: Seed of the run.
        place: Epoch, step and side.
        chunks: Numbers of the chunks within the step.
        count: Random numbers per chunk.

    Returns:
        (len(chunks), count) float64.
    """
    return numpy_numbers(*_start(seed, place, chunks, count), len(chunks), count)


def numbers_on(
    device: torch.device, seed: int, place: tuple[int, int, Side], chunks: range, count: int
) -> Tensor:
    """Return ``random_numbers`` on a device."""
    (key, counter), like = _start(seed, place, chunks, count), torch.empty(0, device=device)
    return philox_numbers(key.view(np.int64).tolist(), counter, len(chunks), count, like)


def _start(
    seed: int, place: tuple[int, int, Side], chunks: range, count: int
) -> tuple[np.ndarray, list[int]]:
    """Return the key of the generator, (2,) uint64, and its counter before the first chunk."""
    epoch, step, side = place
    key = np.random.SeedSequence(seed, spawn_key=(epoch, _STREAM)).generate_state(2, np.uint64)
    return key, [chunks.start * -(-count // PER_COUNTER), step, SIDES.index(side), 0]


@dataclass(frozen=True)
class Chunks:
    """The input of a sampler: chunks of triples of one side.

    The triples of a chunk share their candidates.  Chunks are whole, the same on every rank that
    trains a part of them; a chunk that the end of the step cuts short has its triples repeated.

    Args:
        side: The side that is corrupted, "head" or "tail".
        numbers: (C, K) random numbers in [0, 1).
        load: Returns the triples (C, b, 3) int64.
    """

    side: Side
    numbers: np.ndarray
    load: Callable[[], np.ndarray]

    @property
    def triples(self) -> np.ndarray:
        """(C, b, 3) int64, columns head, relation, tail; read only when a sampler wants them."""
        return self.load()


class NegativeSampler:
    """Base of samplers: turns random numbers, and triples if it likes, into candidates.

    A sampler has no random numbers of its own.  As the numbers and the chunks are a function of the
    position in training, so are the candidates, on any number of ranks.

    A sampler that treats all triples alike gives ``__call__``.  One that knows the relation or the
    entities of a triple (typed, Bernoulli) gives ``sample``, ``excluded`` or both.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings: keys of ``negatives`` of the same name, and of ``negatives.options``."""

    @classmethod
    def of(cls, store: TripleStore, options: Any) -> NegativeSampler:
        """Return the sampler for a graph; by default constructed with both arguments."""
        return construct_class("negative_sampler", cls, store, options)

    @classmethod
    def frequency_power(cls, options: Any) -> float | None:
        """Return the power of an entity's frequency that its probability is in proportion to.

        The planner estimates the rows per step with it.  None, the default, is uniform.
        """
        return None

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return an entity id, int64, for each random number, and from no other input."""
        raise NotImplementedError

    def sample(self, chunks: Chunks) -> np.ndarray:
        """Return the candidates of chunks: (C, K) int64, one for each random number.

        The candidates of a chunk are a function of its random numbers and triples only.
        """
        return self(chunks.numbers)

    def excluded(
        self, chunks: Chunks, triples: np.ndarray, candidates: np.ndarray
    ) -> np.ndarray | None:
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

    def chance(self, ids: np.ndarray) -> np.ndarray:
        """Return the probability of each id (...) per random number; ``log_q`` needs it."""
        raise ConfigError(
            f"negatives.log_q: {type(self).__name__} does not say how likely each entity is; give "
            "it a method chance, or set negatives.log_q to false"
        )

    def expected(self, chunks: Chunks, ids: np.ndarray) -> np.ndarray:
        """Return how often a chunk is expected to have each of some candidates, ids (C, K)."""
        return chunks.numbers.shape[1] * self.chance(ids)


def check_sampler(
    sampler: NegativeSampler, num_entities: int, sides: Sequence[Side], triples: np.ndarray | None
) -> None:
    """Check that a sampler keeps to its contract, on a few random numbers.

    Args:
        sampler: The sampler that negatives.sampling names.
        num_entities: N.
        sides: The sides that are sampled.
        triples: (T, 3) training triples; None where candidates are shared by all queries of a
            batch, so that no sampler can look at triples.

    Raises:
        ConfigError: The candidates have the wrong form, or depend on more than their chunk.
    """
    name = f"negatives.sampling: {type(sampler).__name__}"
    shared = (
        f"{name} looks at triples, and with negatives.regime kvssample all queries of a batch "
        "share their candidates; use negatives.regime sampled"
    )
    if triples is None and type(sampler).excluded is not NegativeSampler.excluded:
        raise ConfigError(shared)
    if type(sampler).sample is NegativeSampler.sample and (
        type(sampler).__call__ is NegativeSampler.__call__
    ):
        raise ConfigError(f"{name} samples nothing; give it a method __call__, or a method sample")

    def some_triples() -> np.ndarray:
        if triples is None:
            raise ConfigError(shared)
        return np.resize(triples[:8], (4, 2, 3)).astype(np.int64)

    ends = [0.0, np.nextafter(1.0, 0.0)]
    numbers = np.append(np.random.default_rng(0).random(62), ends).reshape(4, 16)
    for side in sides:
        chunks = Chunks(side, numbers.copy(), some_triples)
        turned = Chunks(side, numbers[::-1].copy(), lambda: some_triples()[::-1])
        ids = sampler.sample(chunks)
        problem = _problem_of_ids(ids, numbers.shape, num_entities)
        if not (problem or np.array_equal(ids, sampler.sample(turned)[::-1])):
            problem = (
                "returns ids that depend on more than their chunk: ranks would not agree. Compute "
                "them from the chunk's random numbers and triples only, without a generator, a "
                "counter or the position of the chunk"
            )
        if not problem and triples is not None:
            problem = _problem_of_excluded(sampler, chunks, ids)
        if problem:
            raise ConfigError(f"{name} {problem}")


def _problem_of_ids(ids: Any, shape: tuple[int, ...], num_entities: int) -> str:
    """Return what is wrong with sampled ids and what to do, as a clause; empty if all is well."""
    if not (isinstance(ids, np.ndarray) and ids.dtype == np.int64):
        return "does not return int64 ids; convert them by astype(np.int64)"
    if ids.shape != shape:
        return (
            f"returns ids of shape {ids.shape} for random numbers of shape {shape}; return an id "
            "for each random number, in the same shape"
        )
    if ids.min() < 0 or ids.max() >= num_entities:
        return (
            f"returns ids from {ids.min()} to {ids.max()}, outside [0, {num_entities}); return ids "
            "of entities of the store, such as (numbers * store.num_entities).astype(np.int64)"
        )
    return ""


def _problem_of_excluded(sampler: NegativeSampler, chunks: Chunks, ids: np.ndarray) -> str:
    """Return what is wrong with ``excluded`` and what to do, as a clause; empty if all is well."""
    triples = chunks.triples.reshape(-1, 3)
    mask = sampler.excluded(chunks, triples, ids)
    shape = len(triples), ids.shape[1]
    if mask is None or (
        isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == shape
    ):
        return ""
    returned = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
    return (
        f"returns {returned} from excluded, where bool {shape} is due: one row per triple and one "
        "column per candidate; repeat each row of the candidates for the triples of its chunk"
    )


class UniformSampler(NegativeSampler):
    """Samples all entities alike."""

    def __init__(self, num_entities: int):
        self.num_entities = num_entities

    @classmethod
    def of(cls, store: TripleStore, options: Any) -> UniformSampler:
        return cls(store.num_entities)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        return (numbers * self.num_entities).astype(np.int64)

    def chance(self, ids: np.ndarray) -> np.ndarray:
        return np.full(ids.shape, 1 / self.num_entities)


class InBatchSampler(NegativeSampler):
    """Adds the answers of a chunk's triples to the candidates of another sampler.

    Args:
        sampler: The other sampler.
        degrees: By side, (N,) training triples that have an entity there, for ``expected``.
        same_relation: Whether only answers of triples with the same relation are negatives, as in
            TwHIN (El-Kishky et al. 2022).
    """

    def __init__(
        self,
        sampler: NegativeSampler,
        degrees: Mapping[Side, np.ndarray],
        same_relation: bool = False,
    ):
        self.sampler, self.degrees, self.same_relation = sampler, degrees, same_relation
        self._triples = int(degrees["head"].sum())

    def sample(self, chunks: Chunks) -> np.ndarray:
        answers = chunks.triples[..., answer_column(chunks.side)]
        return np.concatenate([self.sampler.sample(chunks), answers], 1)

    def excluded(
        self, chunks: Chunks, triples: np.ndarray, candidates: np.ndarray
    ) -> np.ndarray | None:
        excluded = self.sampler.excluded(chunks, triples, candidates)
        if not self.same_relation:
            return excluded
        others = np.zeros((len(triples), candidates.shape[1]), bool)
        answers = chunks.triples[..., RELATION]  # of the last candidates
        per_triple = np.repeat(answers, len(triples) // len(answers), axis=0)
        others[:, -answers.shape[1] :] = per_triple != triples[:, RELATION, None]
        return others if excluded is None else excluded | others

    def expected(self, chunks: Chunks, ids: np.ndarray) -> np.ndarray:
        """Return the sum of both expectations: the proposals are one mixture.

        A chunk of b triples has b - 1 others than the query's own, out of T - 1.  The share of an
        item is the sampling probability of Yi et al. 2019, counted and not estimated in a stream.
        """
        others, triples = chunks.triples.shape[1] - 1, max(2, self._triples)
        share = self.degrees[chunks.side][ids] / self._triples
        in_batch = others * triples / (triples - 1) * share
        return self.sampler.expected(chunks, ids) + in_batch


STEP = 64  # entities between two stored sums of weights: one byte for eight entities


class DegreeSampler(NegativeSampler):
    """Samples entities in proportion to degree ** power (Mikolov et al. 2013).

    Entities without a training triple are never sampled.  Only the sum of weights before every 64th
    entity is in memory; the other weights are added up again when candidates are sampled.
    """

    @dataclass(frozen=True)
    class Options:
        """The weights.

        Args:
            degree_power: Exponent of an entity's degree.
        """

        degree_power: float = 0.75

        def __post_init__(self) -> None:
            not_negative("negatives.options.degree_power", self.degree_power)

    @classmethod
    def of(cls, store: TripleStore, options: Options) -> DegreeSampler:
        return cls(store.degrees(), options.degree_power)

    @classmethod
    def frequency_power(cls, options: Options) -> float:
        return options.degree_power

    def __init__(self, degrees: np.ndarray, power: float):
        self.degrees, self._power = degrees, float(power)
        self._sums = np.empty(-(-len(degrees) // STEP) + 1)
        _add_up(self.degrees, self._power, STEP, self._sums)
        if not self._sums[-1] > 0:
            raise ValueError("negatives cannot be sampled by degree: no entity is in a triple")

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        total = self._sums[-1]
        # Rounding may reach the total itself, which no entity lies beyond.
        targets = np.minimum(numbers.ravel() * total, np.nextafter(total, 0.0))
        ids = np.empty(len(targets), np.int64)
        _find(self.degrees, self._power, self._sums, targets, ids)
        return ids.reshape(numbers.shape)

    def cumulative(self) -> np.ndarray:
        """Return the sum of weights up to and with each entity, (N,) float64."""
        sums = np.empty(len(self.degrees) + 1)
        _add_up(self.degrees, self._power, 1, sums)
        return sums[1:]

    def chance(self, ids: np.ndarray) -> np.ndarray:
        degree = self.degrees[ids]
        weight = np.power(degree, self._power, where=degree > 0, out=np.zeros(ids.shape))
        return weight / self._sums[-1]


@helper
def _weight(degrees: np.ndarray, power: float, entity: int) -> float:
    return float(degrees[entity]) ** power if degrees[entity] else 0.0


@kernel
def _add_up(degrees: np.ndarray, power: float, step: int, sums: np.ndarray) -> None:
    """Fill in the sum of weights before every step-th entity, and the total at the end."""
    total = 0.0
    for entity in range(len(degrees)):
        if entity % step == 0:
            sums[entity // step] = total
        total += _weight(degrees, power, entity)
    sums[-1] = total


@kernel
def _find(
    degrees: np.ndarray,
    power: float,
    sums: np.ndarray,
    targets: np.ndarray,
    ids: np.ndarray,
) -> None:
    """Find the first entity at which the sum of weights exceeds each target."""
    for i in range(len(targets)):
        block = np.searchsorted(sums, targets[i], side="right") - 1
        entity, total = block * STEP, sums[block]
        while True:
            total += _weight(degrees, power, entity)
            if total > targets[i]:
                break
            entity += 1
        ids[i] = entity
