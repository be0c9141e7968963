"""The largest micro-batch of a rank, and how many different rows it looks up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kge_torchrec.config.data import NegativesConfig
from kge_torchrec.config.registry import resolve
from kge_torchrec.data import SIDES
from kge_torchrec.data.batches.triples import share_of
from kge_torchrec.planning.sizes import Sizes
from kge_torchrec.training.assembly import sides_of


@dataclass(frozen=True)
class Batch:
    """The largest of the micro-batches that ranks have."""

    chunks: int  # C
    triples: int  # b, padding included
    negatives: int  # entities drawn, over chunks and sides
    chance: np.ndarray  # (G,) that an entity of a group occurs
    distinct: np.ndarray  # (M,) different rows of each type, expected
    lookups: np.ndarray  # (M,) rows of each type with duplicates, expected
    pairs: float  # of a different entity and one of its features, expected

    @classmethod
    def of(cls, negatives: NegativesConfig, sizes: Sizes, size: int, shares: int) -> Batch:
        """Return that of a step of ``size`` triples in equal shares."""
        most = -(-size // shares)  # shares of one chunk differ by one triple
        chunks, triples, positives = 1, most, most
        if negatives.chunk_size:
            places = (share_of(size, negatives.chunk_size, n, shares) for n in range(shares))
            shapes = ((*at.shape, int(inside.sum())) for at, inside in places)
            chunks, triples, positives = max(shapes, key=lambda x: x[0] * x[1])
        drawn = chunks * sum(negatives.drawn(side) for side in sides_of(negatives.sides))
        of_draw = chance_of_draw(negatives, sizes)
        chance = sizes.occurring(positives, drawn, of_draw)
        times = 2 * chunks * triples * sizes.chance + drawn * of_draw
        distinct, lookups, pairs = sizes.per_type(chance), sizes.per_type(times), 0.0
        if sizes.features is not None:
            distinct[-1] += sizes.features.distinct(chance)
            lookups[-1] += sizes.features.pairs(times)
            pairs = sizes.features.pairs(chance)
        return cls(chunks, triples, drawn, chance, distinct, lookups, pairs)


def degree_power(negatives: NegativesConfig) -> float | None:
    """Return the exponent of degree sampling; None for uniform sampling."""
    sampler = resolve("negative_sampler", negatives.sampling)
    power: float | None = sampler.frequency_power(negatives.options_in("options"))
    return power


def chance_of_draw(negatives: NegativesConfig, sizes: Sizes) -> np.ndarray:
    """Return the chance (G,) that a negative is one particular entity of a group."""
    chance, options = sizes.drawn(degree_power(negatives)), negatives.among_options
    sides = [side for side in SIDES if side in sides_of(negatives.sides)]
    counts = [negatives.drawn(side) for side in sides]
    by_type = negatives.among == "seen" or (negatives.among == "types" and not options.types)
    if sizes.of_ends is None or not by_type or not sum(counts):
        return chance
    ends = [sizes.of_ends[SIDES.index(side)] for side in sides]
    of_type = np.average(ends, axis=0, weights=counts)
    typed: np.ndarray = options.share * of_type + (1 - options.share) * chance
    return typed
