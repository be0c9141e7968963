"""What a run trains, in sizes alone: a config, the graph's counts and how often entities occur.

How many different entities a batch has, which is what de-duplication saves, is computed from groups
of entities that are drawn equally often, so that a billion of them are a few thousand numbers.  Ids
are taken to be in no order of frequency.

Letters, here and in the rest of this package: N entities, D numbers per entity, R relations, T
triples, W ranks, C chunks of b triples a rank, K negatives a chunk and side, U different entities
of a rank's batch, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.registry import resolve
from kge_torchrec.data.batches.triples import share_of
from kge_torchrec.data.store.filter_index import Degrees
from kge_torchrec.models.model import Objective
from kge_torchrec.models.scorers import SIDES, Side
from kge_torchrec.planning.operations import Cost


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a step, or of a micro-batch."""

    chunks: int  # C
    triples: int  # b, padding included
    positives: int  # triples without padding
    negatives: int  # entities drawn, over chunks and sides
    distinct: float  # U, expected

    @property
    def lookups(self) -> int:
        """Entities of the batch, duplicates included."""
        return 2 * self.chunks * self.triples + self.negatives


@dataclass(frozen=True)
class Workload:
    """A run in sizes.

    build_objective: makes the scorer and its loss from a config and a number of relations, as
        training does.
    frequency: of the entities in triples.

    Raises ConfigError for counts below one.
    """

    config: Config
    num_entities: int
    num_relations: int
    num_triples: int
    build_objective: Callable[[Config, int], Objective]
    frequency: EntityFrequency
    costs: dict[tuple[object, ...], Cost] = field(  # remembered
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("entities", "relations", "triples"):
            value = getattr(self, f"num_{name}")
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @property
    def dim(self) -> int:
        return self.config.model.dim

    def numbers_at_once(self, is_cuda: bool) -> int:
        """What must divide D: FBGEMM's kernels read four numbers of a row at a time."""
        return 4 if is_cuda and self.config.entities.engine == "torchrec" else 1

    @property
    def optimizer(self) -> str:
        return self.config.train.optimizer

    @property
    def sides(self) -> tuple[Side, ...]:
        sides = self.config.negatives.sides
        return tuple(side for side in SIDES if sides in (side, "both"))

    @property
    def examples(self) -> int:
        """What an epoch passes through: triples, or queries, of which there may be fewer.

        Several triples may ask the same query, which occurs once; only the data would tell.
        """
        regime = self.config.negatives.regime
        if regime == "allvsall":
            return len(self.sides) * self.num_entities * self.num_relations
        of_triples = self.config.negatives.examples == "triples"
        return self.num_triples * (1 if of_triples else len(self.sides))

    @property
    def batch_size(self) -> int:
        """Examples of a step over all ranks, never more than there are."""
        return min(self.config.train.batch_size, self.examples)

    @property
    def steps_per_epoch(self) -> float:
        """The last, smaller step counts as its part of a whole one."""
        return self.examples / self.batch_size

    @property
    def candidates(self) -> dict[Side, int]:
        """K of each side."""
        negatives = self.config.negatives
        chunk_size = negatives.chunk_size or self.batch_size
        return {side: negatives.candidates(side, chunk_size) for side in self.sides}

    @cached_property
    def negative_power(self) -> float | None:
        """Exponent of degree sampling; None draws uniformly.  A plan asks for each rank."""
        negatives = self.config.negatives
        sampler = resolve("negative_sampler", negatives.sampling)
        return sampler.frequency_power(negatives.sampler_options())

    def batches(self, world_size: int) -> list[list[RankBatch]]:
        """Every rank's share of a full batch, in its micro-batches."""
        parts = self._shares(world_size * self.config.train.accumulation)
        count = self.config.train.accumulation
        return [parts[rank * count : (rank + 1) * count] for rank in range(world_size)]

    def _shares(self, count: int) -> list[RankBatch]:
        """A full batch dealt to ``count`` ranks or micro-batches of ranks."""
        negatives, cached = self.config.negatives, {}
        chunk_size = negatives.chunk_size or self.batch_size
        batches = []
        for number in range(count):
            share = share_of(self.batch_size, chunk_size, number, count)
            key = (*share.positions.shape, int(share.mask.sum()))
            if key not in cached:
                cached[key] = self._batch(*key)
            batches.append(cached[key])
        return batches

    def _batch(self, chunks: int, triples: int, positives: int) -> RankBatch:
        drawn = chunks * sum(self.config.negatives.drawn(side) for side in self.sides)
        distinct = self.frequency.distinct(positives, drawn, self.negative_power)
        return RankBatch(chunks, triples, positives, drawn, distinct)

    @cached_property
    def objective(self) -> Objective:
        """Scorer and loss on the meta device, where they take no memory."""
        # Whatever else a query is compared with, what is watched is a batch of triples.
        config = replace(self.config, negatives=replace(self.config.negatives, regime="sampled"))
        with torch.device("meta"):
            objective = self.build_objective(config, self.num_relations)
        objective.precision = torch.float32  # meta knows no autocast; this is the larger
        return objective

    @property
    def dense_parameters(self) -> int:
        """Numbers outside the entity table: relations and other parameters of the scorer."""
        return sum(parameter.numel() for parameter in self.objective.parameters())

    def with_dim(self, dim: int) -> Workload:
        """The same with other sizes of rows.  Raises ConfigError if the scorer has none such."""
        return replace(self, config=replace(self.config, model=replace(self.config.model, dim=dim)))

    def with_optimizer(self, name: str) -> Workload:
        """The same with another table optimizer."""
        return self._scored_alike(train=replace(self.config.train, optimizer=name))

    def with_dense_wrapper(self, name: str) -> Workload:
        """The same with another wrapper of the dense parameters."""
        return self._scored_alike(dense=replace(self.config.dense, wrapper=name))

    def with_batch_size(self, size: int) -> Workload:
        """The same with other batches."""
        return self._scored_alike(train=replace(self.config.train, batch_size=size))

    def with_accumulation(self, micro_batches: int) -> Workload:
        """The same with steps cut into another number of micro-batches."""
        return self._scored_alike(train=replace(self.config.train, accumulation=micro_batches))

    def _scored_alike(self, **sections: Any) -> Workload:
        """With other sections of the config; scorer and loss are the same, and so are their costs.

        What was watched at one size is then not watched again.
        """
        other = replace(self, config=replace(self.config, **sections))
        other.costs.update(self.costs)
        if "objective" in self.__dict__:  # has been built
            other.__dict__["objective"] = self.objective
        return other


_EXACT = 4096  # the most popular entities are each a group of their own
_GROUPS = 4096  # groups that the others share

# The exponent whose batches of FB15k-237 (.65 to .75) and WN18RR (.55 to .6) have as many
# different entities as the real ones, rounded up.
TYPICAL_SKEW = 0.7


@dataclass(frozen=True)
class EntityFrequency:
    """How often the entities occur in triples.

    probability: (G,) chance that one head or tail, drawn from the triples, is one given entity of
        the group.
    members: (G,) entities of the group; they add up to N.
    triples: how many there are, if the probabilities are counts of real ones: a batch draws them
        without replacement.  None for a law.
    """

    probability: np.ndarray
    members: np.ndarray
    triples: int | None = None

    @classmethod
    def zipf(cls, num_entities: int, exponent: float) -> EntityFrequency:
        """The i-th most popular entity occurs in proportion to i ** -exponent; 0 is uniform."""
        if exponent == 0:
            return cls(np.array([1 / num_entities]), np.array([float(num_entities)]))
        edges = np.arange(1, min(num_entities, _EXACT) + 2, dtype=np.float64)
        if num_entities > _EXACT:
            rest = np.geomspace(_EXACT + 1, num_entities + 1, _GROUPS + 1)
            edges = np.unique(np.concatenate([edges, np.round(rest)]))
        members = np.diff(edges)
        weight = _power_sums(edges, exponent)
        return cls(weight / weight.sum() / members, members)

    @classmethod
    def of_degrees(cls, degrees: Degrees) -> EntityFrequency:
        """Of a graph, by how often its N entities occur as head or tail."""
        degree, members = degrees.histogram()
        total = int((degree * members).sum())
        return cls(degree / total, members.astype(np.float64), triples=total // 2)

    @property
    def num_entities(self) -> float:
        return float(self.members.sum())

    def powered(self, power: float) -> np.ndarray:
        """(G,) chances of a draw in proportion to frequency ** power, as negatives are drawn."""
        weight = np.where(self.probability > 0, self.probability**power, 0.0)
        return weight / (weight * self.members).sum()

    def occurring(
        self, positives: float, negatives: float, negative_power: float | None = None
    ) -> np.ndarray:
        """(G,) chance that an entity of the group occurs in a batch.

        positives: triples, each with a head and a tail; negatives: entities drawn uniformly, or
        with ``negative_power`` in proportion to frequency to that power.
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # log(0): all triples miss nobody
            if self.triples is None:
                absent = 2 * positives * np.log1p(-self.probability)
            else:
                share = min(positives / self.triples, 1.0)
                degree = self.probability * 2 * self.triples
                absent = np.where(degree > 0, degree * np.log1p(-share), 0.0)
            if negatives:
                drawn: float | np.ndarray = 1 / self.num_entities
                if negative_power is not None:
                    drawn = self.powered(negative_power)
                absent = absent + negatives * np.log1p(-drawn)
        return -np.expm1(absent)

    def distinct(
        self, positives: float, negatives: float, negative_power: float | None = None
    ) -> float:
        """Expected number of different entities in a batch; arguments as of ``occurring``."""
        chance = self.occurring(positives, negatives, negative_power)
        return float((chance * self.members).sum())

    def cache_hits(self, chance: np.ndarray, ratio: float) -> float:
        """Share of a batch's different entities found in a cache of the most popular ones.

        chance: (G,) of ``occurring``; ratio: share of the N rows that the cache holds.
        """
        order = np.argsort(-self.probability, kind="stable")
        members, chance = self.members[order], chance[order]
        room = ratio * self.num_entities - (np.cumsum(members) - members)
        cached = np.clip(room, 0, members)
        return float((cached * chance).sum() / max((members * chance).sum(), 1e-300))


def _power_sums(edges: np.ndarray, exponent: float) -> np.ndarray:
    """Sum of i ** -exponent over the integers of [edges[g], edges[g + 1]), for each g.

    By the integral from half a step before to half a step after, exact to 1e-8 beyond the first
    groups; those that hold one integer are taken exactly.
    """
    low, high = edges[:-1] - 0.5, edges[1:] - 0.5
    if exponent == 1:
        sums = np.log(high / low)
    else:
        sums = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
    single = np.diff(edges) == 1
    return np.where(single, edges[:-1] ** -exponent, sums)
