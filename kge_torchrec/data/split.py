"""Split triples at random, at random within each head, by time, or by the last ones of each head.

No triple is in two splits: repeats are dropped before (`sort.drop_repeats`).  With times, the first
occurrence stays, so test has nothing that was known in train.

Shapes: T triples, N entities, R relations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.config.data import SPLITTERS, SplitOptions
from kge_torchrec.data import HEAD, RELATION, SPLITS, TAIL
from kge_torchrec.data.sort import CHUNK, id_counts
from kge_torchrec.errors import DataError


@dataclass(frozen=True)
class Split(SplitOptions):
    """How triples without splits are split.

    Args:
        by: ``random``; ``head``: at random within the triples of each head; ``time``: the latest
            triples are test, those before them valid; ``last``: the last triples of each head are
            test, those before them valid.
        ratio: Shares of train, valid and test, for all but last.
        count: Triples of each head in valid, and as many in test, for last.
        seed: Seed of what is drawn; for last, of the order of triples with equal times.

    """

    seed: int = 0

    @property
    def times(self) -> bool:
        """Whether triples need a time."""
        return self.by in ("time", "last")

    def apply(
        self,
        triples: np.ndarray,
        weights: np.ndarray | None,
        times: np.ndarray | None,
        entities: pa.Array,
        relations: pa.Array,
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
        """Return triples by split, weights by split if there are some, and the `report`.

        Args:
            triples: (T, 3), each once.
            weights: (T,) or None.
            times: (T,) numbers or dates, for time and last.
            entities: Labels (N,).
            relations: Labels (R,).
        """
        split_of = self.places(triples, times, entities, relations)
        own = {} if weights is None else by_split(weights, split_of)
        return by_split(triples, split_of), own, self.report(times, split_of)

    def places(
        self,
        triples: np.ndarray,
        times: np.ndarray | None,
        entities: pa.Array,
        relations: pa.Array,
    ) -> np.ndarray:
        """Return the split of each triple: (T,) int8 places in ``SPLITS``; arguments as `apply`."""
        if self.by == "random":
            return divide(triples, self.ratio, self.seed, len(entities), len(relations))
        if self.by == "time":
            assert times is not None
            return _by_time(times, self.ratio)
        heads, rng = triples[:, HEAD], np.random.default_rng(self.seed)
        sizes = id_counts(heads, len(entities))
        if self.by == "head":
            order = rng.permutation(len(triples))
            order = order[np.argsort(heads[order], kind="stable")]
            ends = np.cumsum(sizes)
            wanted = [_shares(ends, share) for share in self.ratio[1:]]
        else:
            assert times is not None
            # Ids depend on the order of the rows, so equal times are ordered by labels.
            ties = _numbers(entities, rng)[triples[:, TAIL]]
            ties *= len(relations)
            ties += _numbers(relations, rng)[triples[:, RELATION]]
            order = np.lexsort((ties, times, heads))
            del ties
            wanted = [np.full(len(sizes), self.count)] * 2
        return _last_of_heads(order, sizes, *wanted)

    def report(self, times: np.ndarray | None, split_of: np.ndarray) -> dict[str, Any]:
        """Return what a store reports: options, and by time the last time of each split."""
        own = asdict(self) | {"ratio": list(self.ratio)}
        names = [*SPLITTERS[self.by], *(["seed"] if self.by != "time" else [])]
        results = {"by": self.by, **{name: own[name] for name in names}}
        if self.by == "time":
            assert times is not None
            parts = {name: times[split_of == place] for place, name in enumerate(SPLITS)}
            results["until"] = {name: _plain(own.max()) for name, own in parts.items() if len(own)}
        return results


def joined_times(blocks: Sequence[pa.Array | None]) -> np.ndarray:
    """Return the times (T,) of all batches: int64, float64 or datetime64.

    Raises:
        DataError: They are numbers in some and dates in others, or only some have a time zone.
    """
    tables = [pa.table({"time": part}) for part in blocks]
    try:
        joined = pa.concat_tables(tables, promote_options="permissive")["time"]
    except pa.ArrowException as error:
        kinds = " and ".join(sorted({str(part.type) for part in blocks if part is not None}))
        raise DataError(
            f"times are {kinds}: write them alike, all as numbers or all as dates, with a time "
            "zone or without"
        ) from error
    return np.require(joined.to_numpy(), requirements="W")  # `drop_repeats` changes it


def _plain(time: Any) -> Any:
    """Return a time for JSON: a number, or a date as short as it is exact."""
    is_date = isinstance(time, np.datetime64)
    return str(np.datetime_as_string(time, "auto")) if is_date else time.item()


def _by_time(times: np.ndarray, ratio: Sequence[float]) -> np.ndarray:
    """Return splits (T,) of triples by their times; equal times are in one split, the earlier."""
    total = len(times)
    valid, test = (round(total * share) for share in ratio[1:])
    lasts = [max(total - valid - test, 1) - 1, max(total - test, 1) - 1]
    cuts = np.partition(times, lasts)[lasts]
    return (times > cuts[0]).astype(np.int8) + (times > cuts[1])


def _last_of_heads(
    order: np.ndarray, sizes: np.ndarray, valid: np.ndarray, test: np.ndarray
) -> np.ndarray:
    """Return splits (T,): the last triples of each head are test, those before them valid.

    Args:
        order: (T,) the triples by head, and in order within each head.
        sizes: (N,) triples of each head.
        valid: (N,) wanted triples of each head in valid.
        test: (N,) wanted triples of each head in test; one triple always stays in train.
    """
    room = np.maximum(sizes - 1, 0)
    test = np.minimum(test, room)
    held_out = test + np.minimum(valid, room - test)
    left = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(order))  # of the head, from here on
    split_of = np.empty(len(order), np.int8)
    split_of[order] = left <= np.repeat(held_out, sizes)
    split_of[order] += left <= np.repeat(test, sizes)
    return split_of


def _shares(ends: np.ndarray, share: float) -> np.ndarray:
    """Return a share of the triples of each head, rounded so that the sum is right: (N,)."""
    # Halves are rounded up: rounded to even, 1.5 and 2.5 would leave a head with a share of 1 none.
    return np.diff(np.floor(ends * share + 0.5).astype(np.int64), prepend=0)


def _numbers(labels: pa.Array, rng: np.random.Generator) -> np.ndarray:
    """Return a number for each label that depends on the set of labels, not on their order."""
    numbers = np.empty(len(labels), np.int64)
    numbers[pc.array_sort_indices(labels)] = rng.permutation(len(labels))
    return numbers


def divide(
    triples: np.ndarray, ratio: Sequence[float], seed: int, num_entities: int, num_relations: int
) -> np.ndarray:
    """Return a random split for each of ``triples`` (T, 3): (T,) int8 places in ``SPLITS``.

    In a random order, the first triple of each entity and of each relation is in train.  Valid and
    test are sampled from the others, so they are smaller than ``ratio`` where few others are left.
    """
    total = len(triples)
    order = np.random.default_rng(seed).permutation(total)
    bound = np.zeros(total, bool)
    for columns, size in (((0, 2), num_entities), ((1,), num_relations)):
        first = np.full(size, total)
        for start in range(0, total, CHUNK):
            rows = triples.take(order[start : start + CHUNK], axis=0)
            places = np.arange(start, start + len(rows))
            for column in columns:
                np.minimum.at(first, rows[:, column], places)
        bound[first[first < total]] = True
    free = order[~bound]
    num_valid, num_test = held_out(total, ratio, len(free))
    split_of = np.zeros(total, np.int8)
    split_of[free[:num_valid]] = 1
    split_of[free[num_valid : num_valid + num_test]] = 2
    return split_of


def held_out(total: int, ratio: Sequence[float], free: int) -> tuple[int, int]:
    """Return the numbers of triples in valid and test, of which only ``free`` may leave train."""
    num_valid, num_test = (round(total * share) for share in ratio[1:])
    if num_valid + num_test > free:
        num_valid = free * num_valid // (num_valid + num_test)
        num_test = free - num_valid
    return num_valid, num_test


def by_split(rows: np.ndarray, split_of: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows (T, ...) of each split in the order of the input; ``split_of``: `divide`."""
    return {
        split: rows.take(np.flatnonzero(split_of == index), axis=0)
        for index, split in enumerate(SPLITS)
    }
