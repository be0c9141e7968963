"""The sizes of a graph, and how many different entities a batch of its triples has.

The number of different entities in a batch decides what de-duplication saves. It is computed from
groups of entities that are drawn equally often, so a billion entities take a few thousand values.
Ids are assumed to be in no order of frequency within their node type.

Letters, here and in the rest of this package: N rows of the table, D elements per row, T triples, W
ranks, C chunks of b triples per rank, K candidates per chunk and side, G groups of entities, M node
types. With all entities as candidates: Q queries of a step (the same on every rank).
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

_EXACT = 4096  # the most popular entities are each a group of their own
_GROUPS = 4096  # groups for the other entities
# Batches drawn with this exponent have as many different entities as the batches of FB15k-237 (0.65
# to 0.75) and WN18RR (0.55 to 0.6), rounded up.
TYPICAL_SKEW = 0.7
Runs = tuple[tuple[str, range], ...]


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
        probability: (G,) chance that a random head or tail is one particular entity of the group.
        members: (G,) number of entities per group.
        counted: Whether the probabilities are counts of real triples. A batch then draws them
            without replacement.
        runs: Runs of ids of one node type, with its label; features are one. Empty if the graph has
            neither.
        run: (G,) the run of ids that the entities of each group are of; None if it is not known.
        of_ends: (2, G) chance that a random entity of the type of a random head (tail) is one
            particular entity of the group; None if there is only one type.
        features: Those of the entities, if there are any.

    Raises:
        ConfigError: A count is below one.
    """

    entities: int
    relations: int
    triples: int
    probability: np.ndarray
    members: np.ndarray
    counted: bool = False
    runs: Runs = ()
    run: np.ndarray | None = None
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
        """Return sizes with Zipf's law: the i-th entity occurs in proportion to i ** -skew."""
        edges = np.arange(1, min(max(1, entities), _EXACT) + 2, dtype=np.float64)
        if entities > _EXACT:
            rest = np.geomspace(_EXACT + 1, entities + 1, _GROUPS + 1)
            edges = np.unique(np.concatenate([edges, np.round(rest)]))
        members = np.diff(edges)
        weight = _power_sums(edges, skew)
        probability = weight / weight.sum() / members
        return cls(entities, relations, triples, probability, members, runs=runs)

    @classmethod
    def of_store(cls, store: TripleStore) -> Sizes:
        """Return the sizes of prepared triples.

        It maps the degrees itself, so that the pages that it reads do not stay in memory.
        """
        heads, tails = map(TripleStore.open(store.path).degrees, SIDES)
        runs = tuple(runs_of_types(store))
        sizes = cls.of_degrees(
            heads, tails, store.num_relations, [x for x in runs if x[1].stop <= store.num_entities]
        )
        sizes = replace(sizes, runs=runs if len(runs) > 1 else ())
        features = Features.of(store)
        if features is None:
            return sizes
        assert sizes.run is not None
        degrees = heads + tails
        first = np.searchsorted(sizes.run, np.arange(len(runs) - 1))
        groups = [
            start + np.unique(degrees[ids.start : ids.stop], return_inverse=True)[1]
            for start, (_, ids) in zip(first, runs, strict=False)
        ]
        group = np.repeat(np.concatenate(groups), features.indptr.diff().numpy())
        return replace(sizes, features=FeatureSizes(features.count, features.ids.numpy(), group))

    @classmethod
    def of_degrees(
        cls,
        heads: np.ndarray,
        tails: np.ndarray,
        relations: int = 1,
        runs: Sequence[tuple[str, range]] = (),
    ) -> Sizes:
        """Return the sizes of a graph without features.

        Args:
            heads: (N,) triples that have each entity as head.
            tails: (N,) the same as tail.
            relations: Number of relations.
            runs: The type and the ids of each run of ids of one type; all entities by default.
        """
        runs, triples = runs or [(ENTITY, range(len(heads)))], int(heads.sum())
        both = [[end[ids.start : ids.stop] for end in (heads, tails)] for _, ids in runs]
        counted = [value_counts(map(np.add, *map(chunks, ends))) for ends in both]
        degree, members = (np.concatenate(x) for x in zip(*counted, strict=True))
        run = np.repeat(np.arange(len(runs)), [len(x) for x, _ in counted])
        names, kind = np.unique([kind for kind, _ in runs], return_inverse=True)
        of_ends = None
        if len(names) > 1:
            sizes = np.bincount(kind, [len(ids) for _, ids in runs])
            totals = np.array([[end.sum() for end in ends] for ends in both])
            of_kinds = np.stack([np.bincount(kind, end) for end in totals.T])
            of_ends = (of_kinds / triples / sizes)[:, kind[run]]
        chance, members = degree / (2 * triples), members.astype(np.float64)
        counts = len(heads), relations, triples
        return cls(*counts, chance, members, counted=True, run=run, of_ends=of_ends)

    @property
    def num_features(self) -> int:
        """Number of features of entities, whose rows lie behind those of all entities."""
        return 0 if self.features is None else self.features.count

    @property
    def rows(self) -> int:
        """N: rows of the table."""
        return self.entities + self.num_features

    @property
    def graph(self) -> GraphSize:
        """The counts that values for nulls of a config depend on."""
        typed = not {kind for kind, _ in self.runs} <= {ENTITY, FEATURES}
        return GraphSize(
            self.entities, self.relations, self.triples, typed=typed, features=self.num_features
        )

    def drawn(self, power: float | None) -> np.ndarray:
        """Return (G,) chances of a draw in proportion to frequency ** power; uniform if None."""
        if power is None:
            return np.full_like(self.probability, 1 / self.members.sum())
        weight = np.where(self.probability > 0, self.probability**power, 0.0)
        return weight / (weight * self.members).sum()

    def occurring(self, positives: float, negatives: float, drawn: np.ndarray) -> np.ndarray:
        """Return (G,) the chance that an entity of the group occurs in a batch.

        Args:
            positives: Number of triples, each with a head and a tail.
            negatives: Number of entities that are drawn besides.
            drawn: (G,) chances of a draw.
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # log(0): all triples miss no entity
            if not self.counted:
                absent = 2 * positives * np.log1p(-self.probability)
            else:
                share = min(positives / self.triples, 1.0)
                degree = self.probability * 2 * self.triples
                absent = np.where(degree > 0, degree * np.log1p(-share), 0.0)
            if negatives:
                absent = absent + negatives * np.log1p(-drawn)
        return -np.expm1(absent)

    def per_type(self, values: np.ndarray, types: Sequence[str]) -> np.ndarray:
        """Return the sums over the entities of each type (M,) of a value per entity (G,).

        In proportion to their numbers of entities, if it is not known where the groups are.
        """
        of_groups = self.members * values
        if len(types) == 1:
            return np.array([of_groups.sum()])
        place = [types.index(kind) for kind, _ in self.runs]
        if self.run is not None:
            return np.bincount(np.array(place)[self.run], of_groups, len(types))
        counts = np.bincount(place, [len(ids) for _, ids in self.runs], len(types))
        return of_groups.sum() * counts / counts.sum()

    def cache_hits(self, chance: np.ndarray, ratio: float) -> float:
        """Return the share of a batch's different entities that a cache of popular rows holds.

        Args:
            chance: (G,) from ``occurring``.
            ratio: Share of the entities' rows that the cache holds.
        """
        order = np.argsort(-self.probability, kind="stable")
        members, chance = self.members[order], chance[order]
        room = ratio * members.sum() - (np.cumsum(members) - members)
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
    runs: Runs = ()
    if isinstance(entities, str) and "=" in entities:
        runs = _runs_of_counts(entities)
        entities = runs[-1][1].stop
    given = {"entities": entities, "relations": relations, "triples": triples}
    counts: dict[str, Any] = {name: count(name, x) for name, x in given.items() if x is not None}
    law = TYPICAL_SKEW if skew is None else skew
    if len(counts) == len(given):
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
    runs = tuple((kind, x) for kind, x in zip([*counts] * PARTS, ids, strict=True) if x)
    if not runs:
        raise ConfigError("entities must be at least 1, got 0")
    return runs
