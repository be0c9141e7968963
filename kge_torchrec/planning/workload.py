"""What a run trains, in sizes alone: a config, the graph's counts and how often entities occur.

Letters, here and in the rest of this package: N entities, D numbers per entity, R relations, T
triples, W ranks, C chunks of b triples a rank, K negatives a chunk and side, U different entities
of a rank's batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.data.batches import share_of
from kge_torchrec.models.objective import Objective
from kge_torchrec.models.scorers import SIDES, Side
from kge_torchrec.planning.popularity import Popularity


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
    popularity: of the entities in triples.

    Raises ConfigError for counts below one.
    """

    config: Config
    num_entities: int
    num_relations: int
    num_triples: int
    build_objective: Callable[[Config, int], Objective]
    popularity: Popularity
    costs: dict = field(default_factory=dict, init=False, repr=False, compare=False)  # remembered

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
        return SIDES if sides == "both" else (sides,)

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
    def negative_power(self) -> float | None:
        """Exponent of degree sampling; None draws uniformly."""
        negatives = self.config.negatives
        return negatives.degree_power if negatives.sampling == "degree" else None

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
            key = (*share.positions.shape, int(share.counted.sum()))
            if key not in cached:
                cached[key] = self._batch(*key)
            batches.append(cached[key])
        return batches

    def _batch(self, chunks: int, triples: int, positives: int) -> RankBatch:
        drawn = chunks * self.config.negatives.count * len(self.sides)
        distinct = self.popularity.distinct(positives, drawn, self.negative_power)
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

    def _scored_alike(self, **sections) -> Workload:
        """With other sections of the config; scorer and loss are the same, and so are their costs.

        What was watched at one size is then not watched again.
        """
        other = replace(self, config=replace(self.config, **sections))
        other.costs.update(self.costs)
        if "objective" in self.__dict__:  # has been built
            other.__dict__["objective"] = self.objective
        return other
