"""The sizes of a run: its config, the counts of the graph, and how often entities occur.

Letters, here and in the rest of this package: N entities, D elements per row, R relations, T
triples, W ranks, C chunks of b triples per rank, K candidates per chunk and side, U different
entities of a rank's batch, G groups of entities, M tables, P elements of dense parameters. With all
entities as candidates: Q queries of a step (the same on every rank), n rows of a rank, F rows that
every rank fetches.
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
from kge_torchrec.data import ENTITY, SIDES
from kge_torchrec.data.batches.triples import share_of
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import runs_of_types
from kge_torchrec.models.model import Objective
from kge_torchrec.models.scorers import Side
from kge_torchrec.planning.frequency import EntityFrequency
from kge_torchrec.training.assembly import build_objective, sides_of


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a step, or of a micro-batch."""

    chunks: int  # C
    triples: int  # b, padding included
    positives: int  # triples without padding
    negatives: int  # entities drawn, over chunks and sides
    by_table: np.ndarray  # (2, M) rows, expected: different ones, and with duplicates
    pairs: float = 0.0  # of a different entity and one of its features, expected

    @property
    def distinct(self) -> float:
        """U, expected, and the number of different features of these entities."""
        return float(self.by_table[0].sum())

    @property
    def lookups(self) -> int:
        """Number of entities in the batch and of their features, expected, with duplicates."""
        return round(self.by_table[1].sum())


def types_of(store: TripleStore) -> tuple[tuple[str, range], ...]:
    """Return the runs of ids of one node type of a store, with its label; empty for one run."""
    runs = runs_of_types(store)
    return tuple(runs) if len(runs) > 1 else ()


@dataclass(frozen=True)
class Workload:
    """The sizes of a run.

    Args:
        config: Settings of the run, without nulls that depend on the graph.
        num_entities: N, and the features of entities, whose rows are in the same table.
        num_relations: R.
        num_triples: T, of the training split.
        frequency: How often the entities occur in triples.
        types: Runs of ids of one node type, with its label; features are one. Empty for one run.
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
        counts = store.num_rows, store.num_relations, len(store.train)
        return cls(config, *counts, frequency, types_of(store))

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
        """The type, ids and optimizer of each table; without types one of all entities."""
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

    @cached_property
    def drawn(self) -> np.ndarray:
        """(G,) chance that a negative is one particular entity of a group."""
        negatives, frequency = self.config.negatives, self.frequency
        chance, options = frequency.drawn(self.negative_power), negatives.among_options
        counts = [negatives.drawn(side) for side in SIDES if side in self.sides]
        by_type = negatives.among == "seen" or (negatives.among == "types" and not options.types)
        if frequency.of_ends is None or not by_type or not sum(counts):
            return chance
        ends = [of for side, of in zip(SIDES, frequency.of_ends, strict=True) if side in self.sides]
        of_type = np.average(ends, axis=0, weights=counts)
        return options.share * of_type + (1 - options.share) * chance

    def batches(self, world_size: int) -> list[list[RankBatch]]:
        """Return the share of every rank in a full batch, as a list of its micro-batches."""
        count, cached = self.micro_batches, {}
        chunk_size = self.config.negatives.chunk_size or self.batch_size
        shares: list[list[RankBatch]] = [[] for _ in range(world_size)]
        for number in range(world_size * count):
            positions, inside = share_of(self.batch_size, chunk_size, number, world_size * count)
            key = (*positions.shape, int(inside.sum()))
            if key not in cached:
                cached[key] = self._batch(*key)
            shares[number // count].append(cached[key])
        return shares

    def _batch(self, chunks: int, triples: int, positives: int) -> RankBatch:
        drawn = chunks * sum(self.config.negatives.drawn(side) for side in self.sides)
        frequency, features = self.frequency, self.frequency.features
        runs = [ids for _, ids, _ in self.tables]
        chance = frequency.occurring(positives, drawn, self.drawn)
        times = 2 * chunks * triples * frequency.probability + drawn * self.drawn
        rows = np.stack([frequency.per_run(x, runs) for x in (chance, times)])
        if features is None:
            return RankBatch(chunks, triples, positives, drawn, rows)
        rows[:, -1] += features.distinct(chance), features.pairs(times)
        return RankBatch(chunks, triples, positives, drawn, rows, features.pairs(chance))

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
        others = ("train.", "dense.", "entities.placement")
        same_objective = all(key.startswith(others) for key in settings)
        return replace(self, config=config, memo=self.memo if same_objective else {})
