"""Sort, count and deduplicate rows of ids, in memory or in pieces of files.

Three columns are packed into one 64-bit key wherever they fit.

Shapes: T rows, M rows of a piece.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import DTypeLike

CHUNK = 1 << 20  # rows per piece where whole columns would be copied


def key_bits(*sizes: int) -> list[int]:
    """Return the bits of ids below each size in the keys of ``pack``."""
    return [max(1, (size - 1).bit_length()) for size in sizes]


def pack(columns: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray | None:
    """Return one uint64 per row that orders like the columns; None if it does not fit 64 bits.

    ``columns[i]`` (T,) has ids in ``[0, sizes[i])``.
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


def repeats(columns: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that equal an earlier row, ascending, and the first such row of each."""
    key = pack(columns, sizes)
    if key is None:
        order = np.lexsort(columns[::-1])
        equal = np.all([np.diff(column[order]) == 0 for column in columns], axis=0)
    else:
        order = np.argsort(key, kind="stable")
        key = key[order]
        equal = key[1:] == key[:-1]
    places = np.flatnonzero(equal) + 1
    starts = np.flatnonzero(np.append(True, ~equal))  # of runs of equal rows
    first = order[starts[np.searchsorted(starts, places, "right") - 1]]
    again = order[places]
    ascending = np.argsort(again)
    return again[ascending], first[ascending]


def drop_repeats(
    rows: np.ndarray,
    sizes: tuple[int, int],
    most: int,
    folder: Path,
    weights: np.ndarray | None = None,
    times: np.ndarray | None = None,
    old: int = 0,
) -> np.ndarray:
    """Return which triples (T, 3) equal an earlier one, (T,) bool, which may be mapped.

    The earlier one gets the largest weight of all its repeats, but not the first ``old`` triples.
    With times it gets their earliest time, and the largest of the weights at that time: a later
    weight would leak into train.  ``weights`` and ``times`` (T,) are changed in place.
    """
    count = 1 << max(0, -(-len(rows) // most) - 1).bit_length()
    bits = count.bit_length() - 1
    is_repeat = scratch_array(folder, bool, (len(rows),))

    def part_of(rows: np.ndarray) -> np.ndarray:
        """Parts by a sum of ids, which gives the low bits of the tail: keys are shorter."""
        return (rows[:, 0] + rows[:, 1] + rows[:, 2]) & (count - 1)

    for part, numbers in pieces(rows, part_of, count, folder):
        columns = part[:, 0], part[:, 1], part[:, 2] >> bits
        again, first = repeats(columns, (*sizes, (sizes[0] - 1 >> bits) + 1))
        again, first = numbers[again], numbers[first]
        is_repeat[again] = True
        counts = first >= old
        if times is not None:
            before = times[first]
            np.minimum.at(times, first, times[again])
            counts = times[again] == times[first]
            if weights is not None:
                weights[first[before > times[first]]] = 0  # below every weight
        if weights is not None:
            np.maximum.at(weights, first[counts], weights[again[counts]])
    return is_repeat


def pieces(
    rows: np.ndarray, part_of: Callable[[np.ndarray], np.ndarray], count: int, folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the rows (M, 3) of each part, int32, with their numbers (M,), ascending.

    ``part_of`` returns the parts of some rows, below ``count``; several are spread over files.
    """
    if count == 1:
        yield rows, np.arange(len(rows))
        return
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(count)]
        for start, chunk in zip(range(0, len(rows), CHUNK), chunks(rows), strict=False):
            part = part_of(chunk).astype(np.uint16)
            order = np.argsort(part, kind="stable")
            numbered = np.empty((len(chunk), 4), np.uint32)
            numbered[:, :3] = chunk[order]
            numbered[:, 3] = order + start
            ends = np.cumsum(np.bincount(part, minlength=count)).tolist()
            for file, low, high in zip(files, [0, *ends], ends, strict=False):
                file.write(numbered[low:high].data)
        for file in files:
            file.seek(0)
            own = np.fromfile(file, np.uint32).reshape(-1, 4)
            yield own[:, :3].view(np.int32), own[:, 3].astype(np.int64)


def pieces_by_id(
    rows: np.ndarray, column: int, counts: np.ndarray, most: int, folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ``pieces`` of close ids in a column, in order, whose rows are about ``most``.

    A piece is larger where an id has more rows.  ``counts`` (N,) are the rows of each id.
    """
    parts = max(1, -(-len(rows) // most))
    limits = np.searchsorted(np.cumsum(counts), np.arange(1, parts) * len(rows) // parts)
    part_of = lambda some: np.searchsorted(limits, some[:, column], "right")  # noqa: E731
    return pieces(rows, part_of, parts, folder)


def scratch_array(folder: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros in a file without a name, which lives as long as the array."""
    if not shape[0]:
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        array = np.memmap(file, dtype, "w+", shape=shape)
        _reserve(file, folder)
        return array


def new_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros in a file like that of ``np.save``."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with path.open("r+b") as file:
        _reserve(file, path)
    return array


def _reserve(file: IO[bytes], path: Path) -> None:
    """Reserve the space of a mapped file: on a full disk, a write to it would end the process.

    Raises:
        OSError: There is no space.
    """
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def copy_rows(source: np.ndarray, target: Path, of: np.ndarray, value: int) -> np.ndarray:
    """Write the rows of an array (T, ...) where ``of`` (T,) has a value, and return them, mapped.

    The file is like that of ``np.save``.
    """
    count = sum(int((part == value).sum()) for part in chunks(of))
    kept = new_array(target, source.dtype, (count, *source.shape[1:]))
    done = 0
    for rows, part in zip(chunks(source), chunks(of), strict=True):
        rows = rows[part == value]
        kept[done : done + len(rows)] = rows
        done += len(rows)
    return kept
