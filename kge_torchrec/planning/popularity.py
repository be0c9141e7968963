"""How many different entities a batch has: what de-duplication saves.

Entities are put into groups that are drawn equally often, so that a billion of them are a few
thousand numbers.  Ids are taken to be in no order of popularity.

Shapes: N entities, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kge_torchrec.data.degrees import Degrees

_EXACT = 4096  # the most popular entities are each a group of their own
_GROUPS = 4096  # groups that the others share

# The exponent whose batches of FB15k-237 (.65 to .75) and WN18RR (.55 to .6) have as many
# different entities as the real ones, rounded up.
TYPICAL_SKEW = 0.7


@dataclass(frozen=True)
class Popularity:
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
    def zipf(cls, num_entities: int, exponent: float) -> Popularity:
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
    def of_degrees(cls, degrees: Degrees) -> Popularity:
        """Of a graph, by how often its N entities occur as head or tail."""
        degree, members = degrees.histogram()
        total = int((degree * members).sum())
        return cls(degree / total, members.astype(np.float64), triples=total // 2)

    @property
    def num_entities(self) -> float:
        return float(self.members.sum())

    def powered(self, power: float) -> np.ndarray:
        """(G,) chances of a draw in proportion to popularity ** power, as negatives are drawn."""
        weight = np.where(self.probability > 0, self.probability**power, 0.0)
        return weight / (weight * self.members).sum()

    def occurring(
        self, positives: float, negatives: float, negative_power: float | None = None
    ) -> np.ndarray:
        """(G,) chance that an entity of the group occurs in a batch.

        positives: triples, each with a head and a tail; negatives: entities drawn uniformly, or
        with ``negative_power`` in proportion to popularity to that power.
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # log(0): all triples miss nobody
            if self.triples is None:
                absent = 2 * positives * np.log1p(-self.probability)
            else:
                share = min(positives / self.triples, 1.0)
                degree = self.probability * 2 * self.triples
                absent = np.where(degree > 0, degree * np.log1p(-share), 0.0)
            if negatives:
                drawn = 1 / self.num_entities
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
