"""The sizes of a run: its config, the counts of the graph, and how often entities occur.

The number of different entities in a batch decides what de-duplication saves. It is computed from
groups of entities that are drawn equally often, so a billion entities take a few thousand values.
Ids are assumed to be in no order of frequency.

Letters, here and in the rest of this package: N entities, D elements per row, R relations, T
triples, W ranks, C chunks of b triples per rank, K candidates per chunk and side, U different
entities of a rank's batch, G groups of entities, P elements of dense parameters. With all entities
as candidates: Q queries of a step (the same on every rank), n rows of a rank, F rows that every
rank fetches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import Facts, without_effect
from kge_torchrec.config.registry import resolve
from kge_torchrec.data import ENTITY
from kge_torchrec.data.batches.triples import share_of
from kge_torchrec.data.features import Features
from kge_torchrec.data.node_types import runs_of_types
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import Degrees
from kge_torchrec.models.losses import Loss
from kge_torchrec.models.model import Objective
from kge_torchrec.models.scorers import Side
from kge_torchrec.training.assembly import build_objective, sides_of


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a step, or of a micro-batch."""

    chunks: int  # C
    triples: int  # b, padding included
    positives: int  # triples without padding
    negatives: int  # entities drawn, over chunks and sides
    distinct: float  # U, expected, and different features of these entities
    features: float = 0.0  # of the batch's entities, expected, duplicates included
    pairs: float = 0.0  # of a different entity and one of its features, expected

    @property
    def lookups(self) -> int:
        """Number of entities in the batch and of their features, duplicates included."""
        return 2 * self.chunks * self.triples + self.negatives + round(self.features)


@dataclass(frozen=True)
class Workload:
    """The sizes of a run.

    Args:
        config: Settings of the run, without nulls that depend on the graph.
        num_entities: N, and the features of entities, whose rows are in the same table.
        num_relations: R.
        num_triples: T, of the training split.
        frequency: How often the entities occur in triples.
        types: Runs of ids of one node type, with its label, where types have tables of their own.
        memo: The objective and the costs that were measured for it; shared by runs with one
            objective.

    Raises:
        ConfigError: A count is below one.
    """

    config: Config
    num_entities: int
    num_relations: int
    num_triples: int
    frequency: EntityFrequency
    types: tuple[tuple[str, range], ...] = ()
    memo: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.config.entities.tables is not None:
            self._check_types()
        for name in ("entities", "relations", "triples"):
            value = getattr(self, f"num_{name}")
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @classmethod
    def of_store(cls, config: Config, store: TripleStore) -> Workload:
        """Return the workload of a run on prepared triples."""
        frequency = EntityFrequency.of_store(store)
        types = tuple(runs_of_types(store)) if config.entities.tables is not None else ()
        counts = store.num_rows, store.num_relations, len(store.train)
        return cls(config, *counts, frequency, types)

    def _check_types(self) -> None:
        known = {kind for kind, _ in self.types}
        missing = sorted((self.config.entities.tables or {}).keys() - known)
        if missing or not known:
            raise ConfigError(
                f"entities.tables: the sizes of {', '.join(missing) or 'the types'} are not known; "
                "plan with typed data, or give --entities user=600k,item=400k"
            )

    @property
    def tables(self) -> list[tuple[str, range, str]]:
        """The type, ids and optimizer of each entity table; one of all entities without types."""
        if not self.types:
            return [(ENTITY, range(self.num_entities), self.optimizer)]
        entities, default = self.config.entities, self.optimizer
        return [(kind, ids, entities.optimizer_of(kind, default)) for kind, ids in self.types]

    @property
    def num_features(self) -> int:
        """Number of features of entities."""
        return 0 if self.frequency.features is None else self.frequency.features.count

    @property
    def rows_in_words(self) -> str:
        """The rows of the table for people, such as "65 entities and 25 features"."""
        entities = f"{self.num_entities - self.num_features:,} entities"
        return f"{entities} and {self.num_features:,} features" if self.num_features else entities

    @property
    def dim(self) -> int:
        """D."""
        return self.config.model.dim

    @property
    def optimizer(self) -> str:
        """Name of the table's optimizer."""
        return self.config.train.optimizer

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step."""
        return self.config.train.accumulation

    @property
    def is_full(self) -> bool:
        """Whether every query is compared with all entities."""
        return self.config.negatives.is_full

    @property
    def has_closed_form(self) -> bool:
        """Whether the loss over all entities has a closed form, see ``Loss.over_all``."""
        return resolve("loss", self.config.loss.name).over_all is not Loss.over_all

    @property
    def sides(self) -> tuple[Side, ...]:
        """Sides of a triple that are queried."""
        return sides_of(self.config.negatives.sides)

    @property
    def examples(self) -> int:
        """Number of examples per epoch: triples, or queries.

        Several triples can share a query, which then occurs once. Only the data would show that.
        """
        negatives = self.config.negatives
        if negatives.regime == "allvsall":
            entities = self.num_entities - self.num_features
            return len(self.sides) * entities * self.num_relations
        return self.num_triples * (1 if negatives.examples == "triples" else len(self.sides))

    @property
    def batch_size(self) -> int:
        """Number of examples per step over all ranks, at most an epoch's."""
        return min(self.config.train.batch_size, self.examples)

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps per epoch; the last, smaller step counts as a part of one."""
        return self.examples / self.batch_size

    @property
    def candidates(self) -> dict[Side, int]:
        """K per side."""
        negatives = self.config.negatives
        chunk_size = negatives.chunk_size or self.batch_size
        return {side: negatives.candidates(side, chunk_size) for side in self.sides}

    @property
    def queries(self) -> int:
        """Q. A triple is queried on each side, unless an epoch passes through queries."""
        uses_triples = self.config.negatives.examples == "triples"
        return self.batch_size * (len(self.sides) if uses_triples else 1)

    @property
    def fetched(self) -> int:
        """F: one row per query, two for relation prediction or penalties on whole triples."""
        loss = self.config.loss
        uses_triples = any(resolve("regularizer", name).takes_triples for name in loss.regularizers)
        return self.queries * (2 if loss.relation_weight or uses_triples else 1)

    def of_micro_batch(self, count: int) -> int:
        """Return the share of a step's ``count`` queries or rows in its largest micro-batch."""
        return -(-count // self.micro_batches)

    @cached_property
    def negative_power(self) -> float | None:
        """Exponent of degree sampling; None for uniform sampling."""
        negatives = self.config.negatives
        sampler = resolve("negative_sampler", negatives.sampling)
        return sampler.frequency_power(negatives.sampler_options())

    def batches(self, world_size: int) -> list[list[RankBatch]]:
        """Return the share of every rank in a full batch, as a list of its micro-batches."""
        count, cached = self.micro_batches, {}
        chunk_size = self.config.negatives.chunk_size or self.batch_size
        shares: list[list[RankBatch]] = [[] for _ in range(world_size)]
        for number in range(world_size * count):
            share = share_of(self.batch_size, chunk_size, number, world_size * count)
            key = (*share.positions.shape, int(share.mask.sum()))
            if key not in cached:
                cached[key] = self._batch(*key)
            shares[number // count].append(cached[key])
        return shares

    def _batch(self, chunks: int, triples: int, positives: int) -> RankBatch:
        drawn = chunks * sum(self.config.negatives.drawn(side) for side in self.sides)
        frequency, power, features = self.frequency, self.negative_power, self.frequency.features
        batch = RankBatch(
            chunks, triples, positives, drawn, frequency.distinct(positives, drawn, power)
        )
        if features is None:
            return batch
        chance = frequency.occurring(positives, drawn, power)
        per_end, per_negative = (
            features.pairs(x) for x in (frequency.probability, frequency.drawn(power))
        )
        return replace(
            batch,
            distinct=batch.distinct + features.distinct(chance),
            features=2 * chunks * triples * per_end + drawn * per_negative,
            pairs=features.pairs(chance),
        )

    @property
    def objective(self) -> Objective:
        """Scorer and loss on the meta device, where they take no memory."""
        if "objective" not in self.memo:
            # Costs of every regime are measured on batches of triples.
            negatives = replace(self.config.negatives, regime="sampled")
            with torch.device("meta"):
                config = replace(self.config, negatives=negatives)
                objective = build_objective(config, self.num_relations)
            objective.precision = torch.float32  # the meta device has no autocast; this is larger
            self.memo["objective"] = objective
        return self.memo["objective"]

    @property
    def dense_parameters(self) -> int:
        """P: elements of relations and of the scorer's other parameters."""
        return sum(parameter.numel() for parameter in self.objective.parameters())

    def with_settings(self, settings: dict[str, Any]) -> Workload:
        """Return the run with other values for some keys, such as {"train.batch_size": 512}.

        Raises:
            ConfigError: The config does not allow a value, or another key that is set loses its
                effect.
        """
        config = self.config
        for key, value in settings.items():
            section, name = key.split(".")
            changed = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: changed})
        idle = without_effect(self.config, Facts())
        for key, reason in without_effect(config, Facts()).items():
            if key not in idle:
                raise ConfigError(reason)
        same_objective = all(key.startswith(("train.", "dense.")) for key in settings)
        return replace(self, config=config, memo=self.memo if same_objective else {})


_EXACT = 4096  # the most popular entities are each a group of their own
_GROUPS = 4096  # groups for the other entities

# Batches drawn with this exponent have as many different entities as the batches of FB15k-237 (0.65
# to 0.75) and WN18RR (0.55 to 0.6), rounded up.
TYPICAL_SKEW = 0.7


@dataclass(frozen=True)
class FeatureFrequency:
    """Which groups of entities have which features, of M pairs of an entity and a feature.

    Args:
        count: Number of features.
        feature: (M,) from 0.
        group: (M,) the group of the entity in ``EntityFrequency``.
    """

    count: int
    feature: np.ndarray
    group: np.ndarray

    def pairs(self, chance: np.ndarray) -> float:
        """Return the expected number of pairs if an entity of a group occurs by chance (G,)."""
        return float(chance[self.group].sum())

    def distinct(self, chance: np.ndarray) -> float:
        """Return the expected number of different features; ``chance`` as in ``pairs``."""
        with np.errstate(divide="ignore"):  # log(0): an entity always occurs
            absent = np.log1p(-chance[self.group])
        return float(-np.expm1(np.bincount(self.feature, absent, self.count)).sum())


@dataclass(frozen=True)
class EntityFrequency:
    """How often the entities occur in triples.

    Args:
        probability: (G,) chance that a random head or tail is one particular entity of the group.
        members: (G,) number of entities per group; the sum is N.
        triples: Number of triples, if the probabilities are counts of real ones. A batch then draws
            them without replacement. None for a law.
        features: Those of the entities, if they are known.
    """

    probability: np.ndarray
    members: np.ndarray
    triples: int | None = None
    features: FeatureFrequency | None = None

    @classmethod
    def zipf(cls, num_entities: int, exponent: float) -> EntityFrequency:
        """Return Zipf's law: the i-th popular entity occurs in proportion to i ** -exponent."""
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
        """Return the frequencies of a graph, from how often its N entities are head or tail."""
        degree, members = degrees.histogram()
        total = int((degree * members).sum())
        return cls(degree / total, members.astype(np.float64), triples=total // 2)

    @classmethod
    def of_store(cls, store: TripleStore) -> EntityFrequency:
        """Return the frequencies of a graph and of the features of its entities."""
        degrees, features = store.degrees(), Features.of(store)
        frequency = cls.of_degrees(degrees)
        if features is None:
            return frequency
        group = np.searchsorted(degrees.histogram()[0], np.asarray(degrees))
        group = np.repeat(group, np.diff(features.indptr))
        return replace(frequency, features=FeatureFrequency(features.count, features.ids, group))

    @property
    def num_entities(self) -> float:
        """N."""
        return float(self.members.sum())

    def drawn(self, power: float | None) -> np.ndarray:
        """Return (G,) chances of a draw, uniform if power is None; otherwise as ``powered``."""
        if power is None:
            return np.full_like(self.probability, 1 / self.num_entities)
        return self.powered(power)

    def powered(self, power: float) -> np.ndarray:
        """Return (G,) chances of a draw in proportion to frequency ** power."""
        weight = np.where(self.probability > 0, self.probability**power, 0.0)
        return weight / (weight * self.members).sum()

    def occurring(
        self, positives: float, negatives: float, negative_power: float | None = None
    ) -> np.ndarray:
        """Return (G,) the chance that an entity of the group occurs in a batch.

        Args:
            positives: Number of triples, each with a head and a tail.
            negatives: Number of entities that are drawn besides.
            negative_power: Negatives are drawn in proportion to frequency to this power; uniformly
                if None.
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # log(0): all triples miss no entity
            if self.triples is None:
                absent = 2 * positives * np.log1p(-self.probability)
            else:
                share = min(positives / self.triples, 1.0)
                degree = self.probability * 2 * self.triples
                absent = np.where(degree > 0, degree * np.log1p(-share), 0.0)
            if negatives:
                absent = absent + negatives * np.log1p(-self.drawn(negative_power))
        return -np.expm1(absent)

    def distinct(
        self, positives: float, negatives: float, negative_power: float | None = None
    ) -> float:
        """Return the expected number of different entities in a batch; args as in ``occurring``."""
        chance = self.occurring(positives, negatives, negative_power)
        return float((chance * self.members).sum())

    def cache_hits(self, chance: np.ndarray, ratio: float) -> float:
        """Return the share of a batch's different entities that a cache of popular rows holds.

        Args:
            chance: (G,) from ``occurring``.
            ratio: Share of the N rows that the cache holds.
        """
        order = np.argsort(-self.probability, kind="stable")
        members, chance = self.members[order], chance[order]
        room = ratio * self.num_entities - (np.cumsum(members) - members)
        cached = np.clip(room, 0, members)
        return float((cached * chance).sum() / max((members * chance).sum(), 1e-300))


def _power_sums(edges: np.ndarray, exponent: float) -> np.ndarray:
    """Return the sum of i ** -exponent over the integers of [edges[g], edges[g + 1]), for each g.

    A group of several integers takes the integral from half a step before to half a step after,
    which is exact to 1e-8 beyond the first groups.
    """
    low, high = edges[:-1] - 0.5, edges[1:] - 0.5
    if exponent == 1:
        sums = np.log(high / low)
    else:
        sums = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
    single = np.diff(edges) == 1
    return np.where(single, edges[:-1] ** -exponent, sums)
