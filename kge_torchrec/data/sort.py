"""Sort, count and deduplicate rows of ids.

Three columns are packed into one 64-bit key wherever they fit.

Shapes: T rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

CHUNK = 1 << 20  # rows per piece where whole columns would be copied
_MERGED = 1 << 18  # values counted together


def key_bits(*sizes: int) -> list[int]:
    """Return the bits of ids below each size in the keys of ``pack``."""
    return [max(1, (size - 1).bit_length()) for size in sizes]


def pack(columns: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray | None:
    """Return one uint64 per row that orders like the columns; None if it does not fit 64 bits.

    Args:
        columns: (T,) each, ``columns[i]`` with ids in ``[0, sizes[i])``.
        sizes: Number of ids of each column.
    """
    bits = key_bits(*sizes)
    if sum(bits) > 64:
        return None
    key = columns[0].astype(np.uint64)
    for column, width in zip(columns[1:], bits[1:], strict=True):
        key <<= np.uint64(width)
        # Converts piece by piece, where astype would make another array of this size.
        np.bitwise_or(key, column, out=key, dtype=np.uint64, casting="unsafe")
    return key


def unpack(key: np.ndarray, sizes: Sequence[int], dtype: np.dtype) -> list[np.ndarray]:
    """Return the columns that ``pack`` made ``key`` of; overwrites ``key``."""
    columns = []
    for width in reversed(key_bits(*sizes)):
        column = np.empty(len(key), dtype)
        mask = np.uint64((1 << width) - 1)
        np.bitwise_and(key, mask, out=column, dtype=np.uint64, casting="unsafe")
        columns.append(column)
        key >>= np.uint64(width)
    return columns[::-1]


def sorted_rows(columns: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
    """Return the columns with their rows in lexicographic order."""
    key = pack(columns, sizes)
    if key is None:
        order = np.lexsort(columns[::-1])
        return [column[order] for column in columns]
    key.sort()
    return unpack(key, sizes, columns[0].dtype)


def chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield rows (T, ...), which may be mapped, in pieces."""
    yield from (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))


def id_counts(ids: np.ndarray, size: int) -> np.ndarray:
    """Return how often each id in [0, size) is in ``ids`` (T,), which may be mapped: (size,) int64.

    Counts a chunk at a time, since bincount makes an int64 copy of other integers.
    """
    counts = np.zeros(size, np.int64)
    for chunk in chunks(ids):
        low = int(chunk.min())
        own = np.bincount(chunk - low)
        counts[low : low + len(own)] += own
    return counts


def pointers(ids: np.ndarray, size: int) -> np.ndarray:
    """Return where the rows of each id in [0, size) start among sorted ``ids``: (size + 1,)."""
    starts = np.zeros(size + 1, np.int64)
    np.cumsum(id_counts(ids, size), out=starts[1:])
    return starts


def value_counts(parts: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of all parts, ascending, and how often each occurs; int64."""
    values, counts = np.empty((2, 0), np.int64)
    waiting: list[np.ndarray] = []
    for part in chain(parts, [None]):
        if part is not None:
            waiting.append(part)
        # Waiting for as many values as are merged already keeps the repeated merging linear.
        if part is None or sum(map(len, waiting)) > max(_MERGED, len(values)):
            new, times = np.unique(np.concatenate([values[:0], *waiting]), return_counts=True)
            values, slot = np.unique(np.concatenate([values, new]), return_inverse=True)
            counts = np.bincount(slot, np.concatenate([counts, times])).astype(np.int64)
            waiting = []
    return values, counts


def repeats(columns: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that equal an earlier row, ascending, and the first such row of each."""
    key = pack(columns, sizes)
    if key is None:
        order = np.lexsort(columns[::-1])
        equal = np.all([np.diff(column[order]) == 0 for column in columns], axis=0)
        return _again_and_first(order, equal)
    ordered = np.sort(key)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # Few rows share the low bits of a repeated key: only those need the slower sort with positions.
    suspects = np.flatnonzero(_shares_hash(key, twice))
    key = key[suspects]
    order = np.argsort(key, kind="stable")
    equal = key[order][1:] == key[order][:-1]
    return _again_and_first(suspects[order], equal)


def _again_and_first(order: np.ndarray, equal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``repeats`` from a stable order of rows, and from which rows equal the one before."""
    places = np.flatnonzero(equal) + 1
    starts = np.flatnonzero(np.append(True, ~equal))  # of runs of equal rows
    first = order[starts[np.searchsorted(starts, places, "right") - 1]]
    again = order[places]
    ascending = np.argsort(again)
    return again[ascending], first[ascending]


def _shares_hash(key: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return True for every row whose key is in ``others``, and for a few rows more."""
    width = max(10, int(len(others) * 16).bit_length())
    multiplier, shift = np.uint64(0x9E3779B97F4A7C15), np.uint64(64 - min(width, 30))
    table = np.zeros(1 << min(width, 30), bool)
    table[(others * multiplier) >> shift] = True
    return table[(key * multiplier) >> shift]


def drop_repeats(
    triples: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
    sizes: tuple[int, int],
    times: dict[str, np.ndarray] | None = None,
    old: Mapping[str, int] = {},
) -> dict[str, int]:
    """Keep every triple of a split once, at its first place, with the largest of its weights.

    With times it has its earliest time, and the largest of its weights at that time: a later weight
    would tell train what happened after it.

    Args:
        triples: (T, 3) by split; repeats are removed from it, from ``weights`` and from ``times``.
        weights: (T,) of the splits that have them.
        sizes: Number of entities and of relations.
        times: (T,) of the splits that have them.
        old: How many triples at the beginning of each split keep their weights.

    Returns:
        The number of triples dropped, by split.
    """
    dropped = {}
    for split, rows in triples.items():
        again, first = repeats([*rows.T], (sizes[0], sizes[1], sizes[0]))
        dropped[split] = len(again)
        if not len(again):
            continue
        triples[split] = np.delete(rows, again, axis=0)
        counts = first >= old.get(split, 0)
        if times and split in times:
            own = times[split]
            before = own[first]
            np.minimum.at(own, first, own[again])
            counts = own[again] == own[first]
            if split in weights:
                weights[split][first[before > own[first]]] = 0  # below every weight
            times[split] = np.delete(own, again)
        if split in weights:
            own = weights[split]
            np.maximum.at(own, first[counts], own[again[counts]])
            weights[split] = np.delete(own, again)
    return dropped
