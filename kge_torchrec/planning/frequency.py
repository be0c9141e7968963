"""How often entities occur in triples, and how many different ones a batch has.

The number of different entities in a batch decides what de-duplication saves. It is computed from
groups of entities that are drawn equally often, so a billion entities take a few thousand values.
Ids are assumed to be in no order of frequency within their node type.

Shapes: N entities, G groups of entities, K runs of ids of one node type, M pairs of an entity and a
feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kge_torchrec.data import ENTITY, SIDES
from kge_torchrec.data.features import Features
from kge_torchrec.data.sort import chunks, value_counts
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import runs_of_types

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
        run: (G,) the run of ids that the entities of each group are of; None if it is not known.
        of_ends: (2, G) chance that a random entity of the type of a random head (tail) is one
            particular entity of the group; None if there is only one type.
        features: Those of the entities, if they are known.
    """

    probability: np.ndarray
    members: np.ndarray
    triples: int | None = None
    run: np.ndarray | None = None
    of_ends: np.ndarray | None = None
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
    def of_degrees(
        cls, heads: np.ndarray, tails: np.ndarray, runs: Sequence[tuple[str, range]] = ()
    ) -> EntityFrequency:
        """Return the frequencies of a graph.

        Args:
            heads: (N,) triples that have each entity as head.
            tails: (N,) the same as tail.
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
        chance = degree / (2 * triples)
        return cls(chance, members.astype(np.float64), triples, run, of_ends)

    @classmethod
    def of_store(cls, store: TripleStore) -> EntityFrequency:
        """Return the frequencies of a graph and of the features of its entities.

        It maps the degrees itself, so that the pages that it reads do not stay in memory.
        """
        heads, tails = map(TripleStore.open(store.path).degrees, SIDES)
        features, num_entities = Features.of(store), store.num_entities
        runs = [(kind, ids) for kind, ids in runs_of_types(store) if ids.stop <= num_entities]
        frequency = cls.of_degrees(heads, tails, runs)
        if features is None:
            return frequency
        assert frequency.run is not None
        first = np.searchsorted(frequency.run, np.arange(len(runs)))
        degrees = heads + tails
        groups = [
            start + np.unique(degrees[r.start : r.stop], return_inverse=True)[1]
            for start, (_, r) in zip(first, runs, strict=True)
        ]
        group = np.repeat(np.concatenate(groups), features.indptr.diff().numpy())
        feature = features.ids.numpy()
        return replace(frequency, features=FeatureFrequency(features.count, feature, group))

    @property
    def num_entities(self) -> float:
        """N."""
        return float(self.members.sum())

    def drawn(self, power: float | None) -> np.ndarray:
        """Return (G,) chances of a draw in proportion to frequency ** power; uniform if None."""
        if power is None:
            return np.full_like(self.probability, 1 / self.num_entities)
        weight = np.where(self.probability > 0, self.probability**power, 0.0)
        return weight / (weight * self.members).sum()

    def per_run(self, values: np.ndarray, runs: Sequence[range]) -> np.ndarray:
        """Return the sums over the entities of each run (K,) of a value per entity (G,).

        In proportion to their numbers of entities, if nobody knows where the groups are.
        """
        if self.run is not None and len(runs) > 1:
            return np.bincount(self.run, self.members * values, len(runs))
        sizes = np.array([len(ids) for ids in runs])
        return float((self.members * values).sum()) * sizes / sizes.sum()

    def occurring(self, positives: float, negatives: float, drawn: np.ndarray) -> np.ndarray:
        """Return (G,) the chance that an entity of the group occurs in a batch.

        Args:
            positives: Number of triples, each with a head and a tail.
            negatives: Number of entities that are drawn besides.
            drawn: (G,) chances of a draw.
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # log(0): all triples miss no entity
            if self.triples is None:
                absent = 2 * positives * np.log1p(-self.probability)
            else:
                share = min(positives / self.triples, 1.0)
                degree = self.probability * 2 * self.triples
                absent = np.where(degree > 0, degree * np.log1p(-share), 0.0)
            if negatives:
                absent = absent + negatives * np.log1p(-drawn)
        return -np.expm1(absent)

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
