"""The sizes of a graph, and how many different entities a batch of its triples has.

The number of different entities in a batch decides what de-duplication saves. It is computed from
groups of entities that are drawn equally often, so a billion entities take a few thousand values.
Ids are assumed to be in no order of frequency within their node type.

Letters, here and in the rest of this package: N rows of the table, D elements per row, T triples, W
ranks, C chunks of b triples per rank, K candidates per chunk and side, G groups of entities, M node
types, Q queries of a step with all entities as candidates (the same on every rank).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np

from kge_torchrec.config import Config, ConfigError, GraphSize
from kge_torchrec.data import ENTITY, FEATURES, SIDES
from kge_torchrec.data.datasets import EMBEDDED, is_named
from kge_torchrec.data.features import Features
from kge_torchrec.data.sort import chunks, value_counts
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import PARTS, runs_of_types
from kge_torchrec.planning.devices import is_number
from kge_torchrec.training.run_data import open_store

_GROUPS = 4096  # the most popular entities are each a group of their own; groups for the others
# Batches drawn with this exponent have as many different entities as the batches of FB15k-237 (0.65
# to 0.75) and WN18RR (0.55 to 0.6), rounded up.
TYPICAL_SKEW = 0.7
Runs = Sequence[tuple[str, range]]  # runs of ids of one node type, with its label
_NO_RUNS: Runs = ()


@dataclass(frozen=True)
class FeatureSizes:
    """The features of entities: which groups of entities have which, in P pairs.

    Args:
        count: Number of features.
        feature: (P,) from 0.
        group: (P,) the group of the entity in ``Sizes``.
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
class Sizes:
    """The sizes of a graph, and how often its entities occur in triples.

    Args:
        entities: Number of entities, without features.
        relations: Number of relations.
        triples: T, of the training split.
        chance: (G,) that a random head or tail is one particular entity of the group.
        members: (G,) number of entities per group.
        runs: Those of the rows; of features too. One without types and features.
        type: (G,) node type, as a place in ``types``.
        counted: Whether the chances are counts of real triples, of which a batch draws each once.
        of_ends: (2, G) chance that a random entity of the type of a random head (tail) is one
            particular entity of the group; None if that is not known.
        features: Those of the entities, if there are any.

    Raises:
        ConfigError: A count is below one.
    """

    entities: int
    relations: int
    triples: int
    chance: np.ndarray
    members: np.ndarray
    runs: Runs
    type: np.ndarray
    counted: bool = False
    of_ends: np.ndarray | None = None
    features: FeatureSizes | None = None

    def __post_init__(self) -> None:
        for name in ("entities", "relations", "triples"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @classmethod
    def of_counts(
        cls,
        entities: int,
        relations: int,
        triples: int,
        skew: float = TYPICAL_SKEW,
        runs: Runs = (),
    ) -> Sizes:
        """Return sizes with Zipf's law: the i-th entity occurs in proportion to i ** -skew.

        All types have the same share of each group.
        """
        edges = np.arange(1, min(max(1, entities), _GROUPS) + 2, dtype=np.float64)
        if entities > _GROUPS:
            rest = np.geomspace(_GROUPS + 1, entities + 1, _GROUPS + 1)
            edges = np.unique(np.concatenate([edges, np.round(rest)]))
        members, weight = np.diff(edges), _power_sums(edges, skew)
        chance = weight / weight.sum() / members
        runs = runs or [(ENTITY, range(entities))]
        types = list(dict.fromkeys(kind for kind, _ in runs))
        rows = np.zeros(len(types))
        for kind, ids in runs:
            rows[types.index(kind)] += len(ids)
        chance, type = np.tile(chance, len(types)), np.repeat(np.arange(len(types)), len(members))
        members = np.outer(rows / max(1, rows.sum()), members).ravel()
        return cls(entities, relations, triples, chance, members, runs, type)

    @classmethod
    def of_store(cls, store: TripleStore) -> Sizes:
        """Return the sizes of prepared triples.

        It maps the degrees itself, so that the pages that it reads do not stay in memory.
        """
        heads, tails = map(TripleStore.open(store.path).degrees, SIDES)
        runs, features = runs_of_types(store), Features.of(store)
        return cls.of_degrees(heads, tails, store.num_relations, runs, features)

    @classmethod
    def of_degrees(
        cls,
        heads: np.ndarray,
        tails: np.ndarray,
        relations: int = 1,
        runs: Runs = (),
        features: Features | None = None,
    ) -> Sizes:
        """Return the sizes of a graph.

        Args:
            heads: (N,) triples that have each entity as head.
            tails: (N,) the same as tail.
            relations: Number of relations.
            runs: Those of the rows; by default one of all entities.
            features: Those of the entities.
        """
        runs, triples = runs or [(ENTITY, range(len(heads)))], int(heads.sum())
        of_entities = [run for run in runs if run[1].stop <= len(heads)]
        ends = [[end[ids.start : ids.stop] for end in (heads, tails)] for _, ids in of_entities]
        counted = [value_counts(map(np.add, *map(chunks, both))) for both in ends]
        degree, members = (np.concatenate(x) for x in zip(*counted, strict=True))
        order = list(dict.fromkeys(kind for kind, _ in of_entities))
        of_run = np.array([order.index(kind) for kind, _ in of_entities])
        type = np.repeat(of_run, [len(values) for values, _ in counted])
        of_ends = None
        if len(order) > 1:
            rows = np.bincount(of_run, [len(ids) for _, ids in of_entities])
            totals = [[end.sum() for end in both] for both in ends]
            of_types = np.stack([np.bincount(of_run, end) for end in np.transpose(totals)])
            of_ends = (of_types / triples / rows)[:, type]
        feature_sizes = None
        if features is not None:
            starts = accumulate((len(values) for values, _ in counted), initial=0)
            groups = np.concatenate([
                start + np.searchsorted(values, np.add(*both))
                for start, both, (values, _) in zip(starts, ends, counted, strict=False)
            ])  # fmt: skip
            group = np.repeat(groups, features.indptr.diff().numpy())
            feature_sizes = FeatureSizes(features.count, features.ids.numpy(), group)
        return cls(
            len(heads), relations, triples, degree / (2 * triples), members.astype(np.float64),
            runs, type, True, of_ends, feature_sizes,
        )  # fmt: skip

    @property
    def types(self) -> list[str]:
        """The labels of the node types (M), features among them."""
        return list(dict.fromkeys(kind for kind, _ in self.runs))

    @property
    def num_features(self) -> int:
        return 0 if self.features is None else self.features.count

    @property
    def rows(self) -> int:
        """N: the rows of features lie behind those of all entities."""
        return self.entities + self.num_features

    @property
    def graph(self) -> GraphSize:
        """The counts that values for nulls of a config depend on."""
        typed, counts = not {*self.types} <= {ENTITY, FEATURES}, (self.entities, self.relations)
        return GraphSize(*counts, self.triples, typed=typed, features=self.num_features)

    def rows_of_types(self, block: range) -> np.ndarray:
        """Return the number of rows of each type (M,) in a block of ids."""
        place = [self.types.index(kind) for kind, _ in self.runs]
        edges = np.array([0, *(ids.stop for _, ids in self.runs)])
        rows = np.diff(edges.clip(block.start, block.stop))
        return np.bincount(place, rows, len(self.types)).astype(np.int64)

    def per_type(self, values: np.ndarray) -> np.ndarray:
        """Return the sums over the entities of each type (M,) of a value per entity (G,)."""
        return np.bincount(self.type, self.members * values, len(self.types))

    def drawn(self, power: float | None) -> np.ndarray:
        """Return (G,) chances of a draw in proportion to frequency ** power; uniform if None."""
        if power is None:
            return np.full_like(self.chance, 1 / self.members.sum())
        weight = np.where(self.chance > 0, self.chance**power, 0.0)
        return weight / (weight * self.members).sum()

    def occurring(self, positives: float, negatives: float, drawn: np.ndarray) -> np.ndarray:
        """Return (G,) the chance that an entity of the group occurs in a batch.

        Args:
            positives: Number of triples, each with a head and a tail.
            negatives: Number of entities that are drawn besides.
            drawn: (G,) chances of a draw.
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # log(0): all triples miss no entity
            absent = 2 * positives * np.log1p(-self.chance)
            if self.counted:
                degree, share = 2 * self.triples * self.chance, min(positives / self.triples, 1.0)
                absent = np.where(degree > 0, degree * np.log1p(-share), 0.0)
            if negatives:
                absent = absent + negatives * np.log1p(-drawn)
        return -np.expm1(absent)

    def cache_hits(self, chance: np.ndarray, ratio: float) -> float:
        """Return the share of a batch's different entities that a cache of popular rows holds.

        Args:
            chance: (G,) from ``occurring``.
            ratio: Share of the entities' rows that the cache holds.
        """
        order = np.argsort(-self.chance, kind="stable")
        members, chance = self.members[order], chance[order]
        room = ratio * members.sum() - (np.cumsum(members) - members)
        cached = np.clip(room, 0, members)
        return float((cached * chance).sum() / max((members * chance).sum(), 1e-300))


def _power_sums(edges: np.ndarray, exponent: float) -> np.ndarray:
    """Return the sum of i ** -exponent over the integers of [edges[g], edges[g + 1]), for each g.

    A group of several integers takes the integral from half a step before to half a step after,
    which is exact to 1e-8 beyond the first groups.
    """
    x, rest = edges - 0.5, 1 - exponent
    sums = np.diff(np.log(x) if exponent == 1 else x**rest / rest)
    return np.where(np.diff(edges) == 1, edges[:-1] ** -exponent, sums)


def find_sizes(
    config: Config,
    entities: str | int | None = None,
    relations: str | int | None = None,
    triples: str | int | None = None,
    skew: float | None = None,
) -> Sizes:
    """Return the sizes of a run; those that are None are counted in the config's data.

    Args:
        config: The config, for its data.
        entities: A number, a text such as "86M", or numbers by type: "user=60M,item=26M".
        relations: A number or a text.
        triples: A number or a text.
        skew: Zipf's exponent of the frequency of entities.

    Raises:
        ConfigError: A size is not a number or too small, or there is no data to count it in.
        DataError: The data is bad.
    """
    if skew is not None and not (is_number(skew) and 0 <= skew <= 3):
        raise ConfigError(f"--skew must be a number from 0 to 3, got {skew}")
    law, runs = TYPICAL_SKEW if skew is None else skew, _NO_RUNS
    if isinstance(entities, str) and "=" in entities:
        runs = _runs_of_counts(entities)
        entities = runs[-1][1].stop
    options = {"entities": entities, "relations": relations, "triples": triples}
    counts: dict[str, Any] = {name: count(name, x) for name, x in options.items() if x is not None}
    if len(counts) == len(options):
        return Sizes.of_counts(**counts, skew=law, runs=runs)
    path, flags = config.data.path, "--entities, --relations and --triples"
    if path == EMBEDDED and entities is not None:
        raise ConfigError(f"give all of {flags}, or --data.path to take the others from")
    if not is_named(path) and not Path(path).exists():
        raise ConfigError(f"data.path: there is nothing at {path}; give {flags} to plan without")
    with tempfile.TemporaryDirectory() as folder:
        found = Sizes.of_store(open_store(config, Path(folder)))
    if skew is None and entities is None:
        return replace(found, **counts)
    counted = {"entities": found.rows, "relations": found.relations, "triples": found.triples}
    runs = found.runs if entities is None else runs
    return Sizes.of_counts(**(counted | counts), skew=law, runs=runs)


def count(name: str, value: int | str) -> int:
    """Return the number that 86_000_000, 86,000,000, 86M or 1B means.

    Raises:
        ConfigError: It means none; the message has the name of the option.
    """
    digits = str(value).strip().replace(",", "")
    unit = {"k": 10**3, "m": 10**6, "b": 10**9}.get(digits[-1:].lower())
    try:
        return round(float(digits[:-1]) * unit) if unit else int(digits)
    except ValueError:
        raise ConfigError(
            f"--{name}: {value!r} is no number; write it as 86_000_000 or 86M"
        ) from None


def _runs_of_counts(text: str) -> Runs:
    """Return the runs of ids of user=60M,item=26M, in parts as `prepare` numbers typed entities."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name.strip() in counts:
            raise ConfigError(f"--entities: {name.strip()} has two numbers; give one")
        counts[name.strip()] = count("entities", number)
    counts = dict(sorted(counts.items()))
    sizes = [-(-(number - part) // PARTS) for part in range(PARTS) for number in counts.values()]
    ids = starmap(range, pairwise(accumulate(sizes, initial=0)))
    runs = [(kind, x) for kind, x in zip([*counts] * PARTS, ids, strict=True) if x]
    if not runs:
        raise ConfigError("entities must be at least 1, got 0")
    return runs
