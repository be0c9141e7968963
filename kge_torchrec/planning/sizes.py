"""The sizes of a graph, and how many different entities a batch of its triples has.

The number of different entities in a batch decides what de-duplication saves. It is computed from
groups of entities that occur equally often, so a billion entities take a few thousand values.

Letters, here and in the rest of this package: N rows of the table, D elements per row, T triples, W
ranks, C chunks of b triples per rank, K candidates per chunk and side, G groups of entities, Q
queries of a step with all entities as candidates (the same on every rank).
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kge_torchrec.config import Config, ConfigError, GraphSize
from kge_torchrec.config.data import NegativesConfig
from kge_torchrec.config.registry import resolve
from kge_torchrec.data import ENTITY, FEATURES
from kge_torchrec.data.batches.triples import share_of
from kge_torchrec.data.datasets import is_named
from kge_torchrec.data.sort import id_counts
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import runs_of_types
from kge_torchrec.planning.devices import is_number
from kge_torchrec.training.assembly import sides_of
from kge_torchrec.training.run_data import open_store

_GROUPS = 4096  # the most popular entities are each a group of their own; groups for the others
# Batches drawn with this exponent have as many different entities as the batches of FB15k-237 (0.65
# to 0.75) and WN18RR (0.55 to 0.6), rounded up.
TYPICAL_SKEW = 0.7


@dataclass(frozen=True)
class Sizes:
    """The sizes of a graph, and how often its entities occur in triples.

    Args:
        types: Number of rows of each node type, those of features under FEATURES.
        relations: Number of relations.
        triples: T, of the training split.
        chance: (G,) that a random head or tail is one particular entity of the group.
        members: (G,) number of entities per group.
        pairs: Number of pairs of an entity and one of its features.

    Raises:
        ConfigError: A count is below one.
    """

    types: dict[str, int]
    relations: int
    triples: int
    chance: np.ndarray
    members: np.ndarray
    pairs: int = 0

    def __post_init__(self) -> None:
        for name in ("entities", "relations", "triples"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @classmethod
    def of_counts(
        cls,
        entities: int | dict[str, int],
        relations: int,
        triples: int,
        skew: float = TYPICAL_SKEW,
    ) -> Sizes:
        """Return sizes with Zipf's law: the i-th entity occurs in proportion to i ** -skew."""
        types = entities if isinstance(entities, dict) else {ENTITY: entities}
        number = max(1, sum(types.values()))
        edges = np.arange(1, min(number, _GROUPS) + 2, dtype=np.float64)
        if number > _GROUPS:
            rest = np.geomspace(_GROUPS + 1, number + 1, _GROUPS + 1)
            edges = np.unique(np.concatenate([edges, np.round(rest)]))
        members, middle = np.diff(edges), np.sqrt(edges[:-1] * (edges[1:] - 1))
        weight = middle**-skew
        return cls(types, relations, triples, weight / (weight @ members), members)

    @classmethod
    def of_store(cls, store: TripleStore) -> Sizes:
        """Return the sizes of prepared triples.

        It maps the degrees itself, so that the pages that it reads do not stay in memory.
        """
        degrees, features = TripleStore.open(store.path).degrees(), store.features()
        members = id_counts(degrees, int(degrees.max(initial=0)) + 1)
        degree = np.flatnonzero(members)
        members = members[degree]
        types: dict[str, int] = {}
        for kind, ids in runs_of_types(store):
            types[kind] = types.get(kind, 0) + len(ids)
        return cls(
            types,
            store.num_relations,
            len(store.train),
            degree / max(1, degrees.sum()),
            members.astype(np.float64),
            0 if features is None else len(features.ids),
        )

    @property
    def rows(self) -> int:
        """N: the rows of features lie behind those of all entities."""
        return sum(self.types.values())

    @property
    def num_features(self) -> int:
        return self.types.get(FEATURES, 0)

    @property
    def entities(self) -> int:
        return self.rows - self.num_features

    @property
    def graph(self) -> GraphSize:
        """The counts that values for nulls of a config depend on."""
        typed, counts = not {*self.types} <= {ENTITY, FEATURES}, (self.entities, self.relations)
        return GraphSize(*counts, self.triples, typed=typed, features=self.num_features)

    def distinct(self, positives: float, negatives: float, power: float | None = None) -> float:
        """Return the expected number of different entities in a batch.

        Args:
            positives: Number of triples, each with a head and a tail.
            negatives: Number of entities that are drawn besides.
            power: They are drawn in proportion to frequency ** power; uniformly if it is None.
        """
        drawn = np.full_like(self.chance, 1 / self.members.sum())
        if power is not None:
            weight = np.where(self.chance > 0, self.chance**power, 0.0)
            drawn = weight / (weight @ self.members)
        with np.errstate(divide="ignore"):  # log(0): of a single entity
            absent = 2 * positives * np.log1p(-self.chance)
            if negatives:
                absent = absent + negatives * np.log1p(-drawn)
        return float(-np.expm1(absent) @ self.members)


@dataclass(frozen=True)
class Batch:
    """The largest of the micro-batches that ranks have; its numbers of rows are expected."""

    chunks: int  # C
    triples: int  # b, padding included
    negatives: int  # entities drawn, over chunks and sides
    distinct: float  # different rows
    lookups: float  # rows with duplicates
    pairs: float  # of a different entity and one of its features

    @classmethod
    def of(cls, negatives: NegativesConfig, sizes: Sizes, size: int, shares: int) -> Batch:
        """Return that of a step of ``size`` triples in equal shares.

        Typed negatives are counted as drawn from all entities, which is never fewer. Each entity
        is taken to have the mean number of features, which are equally popular.
        """
        most = -(-size // shares)  # shares of one chunk differ by one triple
        count, triples, positives = 1, most, most
        if negatives.chunk_size:
            places = (share_of(size, negatives.chunk_size, n, shares) for n in range(shares))
            shapes = ((*at.shape, int(inside.sum())) for at, inside in places)
            count, triples, positives = max(shapes, key=lambda x: x[0] * x[1])
        drawn = count * sum(negatives.drawn(side) for side in sides_of(negatives.sides))
        distinct = sizes.distinct(positives, drawn, degree_power(negatives))
        lookups, pairs = float(2 * count * triples + drawn), 0.0
        if features := sizes.num_features:
            each = sizes.pairs / sizes.entities
            pairs, lookups = each * distinct, lookups * (1 + each)
            distinct -= features * math.expm1(-pairs / features)
        return cls(count, triples, drawn, distinct, lookups, pairs)


def degree_power(negatives: NegativesConfig) -> float | None:
    """Return the exponent of degree sampling; None for uniform sampling."""
    sampler = resolve("negative_sampler", negatives.sampling)
    power: float | None = sampler.frequency_power(negatives.options_in("options"))
    return power


def find_sizes(
    config: Config,
    entities: str | int | None = None,
    relations: str | int | None = None,
    triples: str | int | None = None,
    skew: float | None = None,
) -> Sizes:
    """Return the sizes of a run: numbers, or those of the config's data.

    Args:
        config: The config, for its data.
        entities: A number, a text such as "86M", or numbers by type: "user=60M,item=26M".
        relations: A number or a text, as ``triples``.
        triples: All three are given, or none.
        skew: Zipf's exponent of the frequency of entities. None: counted, or ``TYPICAL_SKEW``.

    Raises:
        ConfigError: A size is not a number or too small, or there is no data to count it in.
        DataError: The data is bad.
    """
    if skew is not None and not (is_number(skew) and 0 <= skew <= 3):
        raise ConfigError(f"--skew must be a number from 0 to 3, got {skew}")
    options = {"entities": entities, "relations": relations, "triples": triples}
    given: dict[str, Any] = {
        name: _counts_of_types(str(x)) if name == "entities" and "=" in str(x) else count(name, x)
        for name, x in options.items()
        if x is not None
    }
    flags = "--entities, --relations and --triples"
    if given:
        if len(given) < len(options):
            raise ConfigError(f"give all of {flags}, or none to count them in data.path")
        return Sizes.of_counts(**given, skew=TYPICAL_SKEW if skew is None else skew)
    path = config.data.path
    if not is_named(path) and not Path(path).exists():
        raise ConfigError(f"data.path: there is nothing at {path}; give {flags} to plan without")
    with tempfile.TemporaryDirectory() as folder:
        found = Sizes.of_store(open_store(config, Path(folder)))
    if skew is None:
        return found
    return Sizes.of_counts(found.types, found.relations, found.triples, skew)


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


def _counts_of_types(text: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name.strip() in counts:
            raise ConfigError(f"--entities: {name.strip()} has two numbers; give one")
        counts[name.strip()] = count("entities", number)
    return counts
