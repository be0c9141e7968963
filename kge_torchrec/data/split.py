"""Split triples at random, at random within each head, by time, or by the last ones of each head.

Repeats are dropped before (`sort.drop_repeats`).  With times, the first occurrence stays, so test
has nothing that was known in train.  Memory holds some rows, and a few bytes per entity.

Shapes: T triples, M triples of a piece, N entities, R relations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kge_torchrec.config.data import SplitOptions
from kge_torchrec.data import HEAD, RELATION, SPLITS, TAIL
from kge_torchrec.data.shuffle import EpochShuffle
from kge_torchrec.data.sort import CHUNK, chunks, id_counts, pieces_by_id, scratch_array

_MUST_TRAIN = -1  # a place whose triple is the first one of an entity or relation


@dataclass(frozen=True)
class Split:
    """How triples without splits are split; ``seed`` also orders triples with equal times."""

    options: SplitOptions
    seed: int = 0

    @property
    def times(self) -> bool:
        """Whether triples need a time."""
        return self.options.by in ("time", "last")

    def apply(
        self,
        rows: np.ndarray,
        times: np.ndarray | None,
        sizes: tuple[int, int],
        most: int,
        folder: Path,
    ) -> np.ndarray:
        """Return the split of each of the distinct triples (T, 3): (T,) int8 places in ``SPLITS``.

        ``sizes`` are N and R, ``most`` is the number of rows in memory, and ``folder`` is for
        files.
        """
        by, ratio = self.options.by, self.options.ratio
        if by == "random":
            return _at_random(rows, sizes, ratio, self.seed, folder)
        if by == "time":
            assert times is not None
            return _by_time(times, ratio, folder)
        counts = id_counts(rows[:, HEAD], sizes[0])
        if by == "head":
            ends = np.cumsum(counts)
            wanted = [_shares(ends, share) for share in ratio[1:]]
            place = EpochShuffle(len(rows), self.seed, 0)
            return _by_head(rows, counts, wanted, most, folder, lambda _, at: [place(at)])
        own = times
        assert own is not None
        wanted = [np.full(len(counts), self.options.count)] * 2
        order = [EpochShuffle(size, self.seed, 0) for size in sizes]

        def keys(part: np.ndarray, at: np.ndarray) -> list[np.ndarray]:
            # Equal times are ordered by tail and relation, not by their order in the file.
            return [order[1](part[:, RELATION]), order[0](part[:, TAIL]), own[at]]

        return _by_head(rows, counts, wanted, most, folder, keys)

    def report(self, times: np.ndarray | None, split_of: np.ndarray) -> dict[str, Any]:
        """Return what a store reports: options, and by time the last time of each split."""
        by = self.options.by
        options = asdict(self.options) | {"ratio": list(self.options.ratio), "seed": self.seed}
        names = ["count" if by == "last" else "ratio", *(["seed"] if by != "time" else [])]
        results = {"by": by, **{name: options[name] for name in names}}
        if by == "time":
            assert times is not None
            last: dict[str, Any] = {}
            for part, own in zip(chunks(times), chunks(split_of), strict=True):
                for place in np.unique(own).tolist():
                    latest = part[own == place].max()
                    last[SPLITS[place]] = max(latest, last.get(SPLITS[place], latest))
            results["until"] = {name: _plain(last[name]) for name in SPLITS if name in last}
        return results


def _plain(time: Any) -> Any:
    """Return a time for JSON: a number, or a date as short as it is exact."""
    if isinstance(time, np.datetime64):
        return str(np.datetime_as_string(time, "auto"))
    return int(time) if time == int(time) else time.item()


def _at_random(
    rows: np.ndarray, sizes: tuple[int, int], ratio: Sequence[float], seed: int, folder: Path
) -> np.ndarray:
    """Return a random split for each triple (T, 3).

    In a random order, the first triple of each entity and of each relation is in train.  Valid and
    test are sampled from the others, so they are smaller than ``ratio`` where few others are left.
    """
    total, place = len(rows), EpochShuffle(len(rows), seed, 0)
    first = [np.full(size, total, np.uint32) for size in sizes]
    for start, part in zip(range(0, total, CHUNK), chunks(rows), strict=True):
        own = place(np.arange(start, start + len(part))).astype(np.uint32)
        for column, of in ((HEAD, first[0]), (TAIL, first[0]), (RELATION, first[1])):
            np.minimum.at(of, part[:, column], own)
    split_of = scratch_array(folder, np.int8, (total,))  # by place
    for of in first:
        split_of[of[of < total]] = _MUST_TRAIN
    free = total - sum(int((part == _MUST_TRAIN).sum()) for part in chunks(split_of))
    bounds, done = np.cumsum(held_out(total, ratio, free)), 0
    for part in chunks(split_of):
        unbound = np.flatnonzero(part != _MUST_TRAIN)
        number = np.arange(done, done + len(unbound))
        part[part == _MUST_TRAIN] = 0
        part[unbound] = np.where(number < bounds[0], 1, np.where(number < bounds[1], 2, 0))
        done += len(unbound)
    result = scratch_array(folder, np.int8, (total,))
    for start in range(0, total, CHUNK):
        stop = min(start + CHUNK, total)
        result[start:stop] = split_of[place(np.arange(start, stop))]
    return result


def held_out(total: int, ratio: Sequence[float], free: int) -> tuple[int, int]:
    """Return the numbers of triples in valid and test, of which only ``free`` may leave train."""
    num_valid, num_test = (round(total * share) for share in ratio[1:])
    if num_valid + num_test > free:
        num_valid = free * num_valid // (num_valid + num_test)
        num_test = free - num_valid
    return num_valid, num_test


def _by_time(times: np.ndarray, ratio: Sequence[float], folder: Path) -> np.ndarray:
    """Return splits (T,) of triples by their times; equal times are in one split, the earlier."""
    total = len(times)
    valid, test = (round(total * share) for share in ratio[1:])
    lasts = [max(total - valid - test, 1) - 1, max(total - test, 1) - 1]
    ordered = scratch_array(folder, times.dtype, (total,))
    ordered[:] = times
    ordered.partition(lasts)
    split_of = scratch_array(folder, np.int8, (total,))
    for part, own in zip(chunks(split_of), chunks(times), strict=True):
        part[:] = (own > ordered[lasts[0]]).astype(np.int8) + (own > ordered[lasts[1]])
    return split_of


def _by_head(
    rows: np.ndarray,
    counts: np.ndarray,
    wanted: Sequence[np.ndarray],
    most: int,
    folder: Path,
    keys: Callable[[np.ndarray, np.ndarray], list[np.ndarray]],
) -> np.ndarray:
    """Return splits (T,): the last triples of each head are test, those before them valid.

    ``counts`` (N,) are the triples of each head, and ``wanted`` (N,) those in valid, and in test;
    one always stays in train.  ``keys`` returns what triples (M, 3) of a head are ordered by, the
    last key first, from them and their numbers (M,).
    """
    room = np.maximum(counts - 1, 0)
    test = np.minimum(wanted[1], room)
    both = test + np.minimum(wanted[0], room - test)
    split_of = scratch_array(folder, np.int8, (len(rows),))
    for part, numbers in pieces_by_id(rows, HEAD, counts, most, folder):
        order = np.lexsort((*keys(part, numbers), part[:, HEAD]))
        heads = part[order, HEAD]
        # Triples of the head from here on.
        left = np.searchsorted(heads, heads, "right") - np.arange(len(heads))
        own = (left <= both[heads]).astype(np.int8) + (left <= test[heads])
        split_of[numbers[order]] = own
    return split_of


def _shares(ends: np.ndarray, share: float) -> np.ndarray:
    """Return a share of the triples of each head, rounded so that the sum is right: (N,)."""
    # Halves are rounded up: rounded to even, 1.5 and 2.5 would leave a head with a share of 1 none.
    return np.diff(np.floor(ends * share + 0.5).astype(np.int64), prepend=0)
