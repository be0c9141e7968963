"""The filter index of triples on disk, sorted in bounded memory, as `filter_index.build_side` does.

Rows are spread over buckets by splitters, rows that a sample has at equal distances.  Each bucket
is sorted in memory.

Shapes: T triples, N entities, K buckets.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kge_torchrec.data import HEAD, RELATION, TAIL
from kge_torchrec.data.large.work import NpyFile, WorkFolder, npy_writer
from kge_torchrec.data.sort import CHUNK, sorted_rows
from kge_torchrec.kernels.jit import kernel

SAMPLES = 512  # rows of the sample for each bucket
MOST_BUCKETS = 512  # open files


@kernel
def _find_buckets(rows: np.ndarray, splitters: np.ndarray, buckets: np.ndarray) -> None:
    """Fill in how many splitters (K - 1, 3) are at most each row (T, 3)."""
    for number in range(len(rows)):
        low, high = 0, len(splitters)
        while low < high:
            middle = (low + high) // 2
            smaller = False
            for column in range(3):
                if rows[number, column] != splitters[middle, column]:
                    smaller = rows[number, column] < splitters[middle, column]
                    break
            if smaller:
                high = middle
            else:
                low = middle + 1
        buckets[number] = low


def _splitters(rows: NpyFile, columns: list[int], count: int) -> np.ndarray:
    """Return rows (K - 1, 3) that cut the sorted rows into about equal parts."""
    random = np.random.default_rng(0)  # any sample gives the same index
    starts = np.sort(random.integers(0, len(rows), SAMPLES * count))
    sample = []
    for start, chunk in rows.chunks(CHUNK):
        own = starts[np.searchsorted(starts, start) : np.searchsorted(starts, start + CHUNK)]
        sample.append(chunk[own - start][:, columns])
    joined = np.concatenate(sample)
    joined = joined[np.lexsort(joined.T[::-1])]
    return joined[np.arange(1, count) * len(joined) // count]


def write_side(
    rows: NpyFile, side: str, targets: list[Path], sizes: tuple[int, int, int], work: WorkFolder
) -> None:
    """Write the index that answers queries for a side.

    Args:
        rows: (T, 3) triples.
        side: "tail" or "head".
        targets: Files of ``indptr``, ``relations`` and ``entities``.
        sizes: Numbers of entities and relations, and of rows in memory.
        work: The folder for buckets.
    """
    columns = [HEAD, RELATION, TAIL] if side == "tail" else [TAIL, RELATION, HEAD]
    total, (num_entities, num_relations, most_rows) = len(rows), sizes
    count = max(1, min(MOST_BUCKETS, -(-total * 5 // (4 * most_rows))))
    paths = [work.path / f"bucket-{place}" for place in range(count)]
    with ExitStack() as stack:
        bar = stack.enter_context(work.bar(f"index {rows.path.stem} {side}", 2 * total, " triples"))
        if count > 1:
            _spread(rows, columns, paths, bar)
        pointers = _Pointers(targets[0], num_entities)
        outs = [stack.enter_context(npy_writer(path, (total,), np.int32)) for path in targets[1:]]
        for path in paths if total else ():
            part = (
                np.fromfile(path, np.int32).reshape(-1, 3)
                if count > 1
                else rows.read(0, total)[:, columns]
            )
            if not len(part):
                continue
            low = int(part[:, 0].min())  # shorter keys: those of one bucket have close anchors
            span = int(part[:, 0].max()) - low + 1
            keys = (part[:, 0] - low, part[:, 1], part[:, 2])
            del part
            anchors, *others = sorted_rows(keys, (span, num_relations, num_entities))
            del keys
            for out, column in zip(outs, others, strict=True):
                column.tofile(out)
            pointers.add(anchors, low)
            bar.update(len(anchors))
        pointers.finish()
    for path in paths:
        path.unlink(missing_ok=True)


def _spread(rows: NpyFile, columns: list[int], paths: list[Path], bar: tqdm) -> None:
    splitters = _splitters(rows, columns, len(paths))
    with ExitStack() as stack:
        outs = [stack.enter_context(path.open("wb")) for path in paths]
        for _, chunk in rows.chunks(CHUNK):
            part = np.ascontiguousarray(chunk[:, columns])
            buckets = np.empty(len(part), np.uint16)
            _find_buckets(part, splitters, buckets)
            part = part[np.argsort(buckets, kind="stable")]
            ends = np.cumsum(np.bincount(buckets, minlength=len(paths))).tolist()
            for out, start, stop in zip(outs, [0, *ends], ends, strict=False):
                part[start:stop].tofile(out)
            bar.update(len(part))


class _Pointers:
    """Writes where the rows of each anchor start, (N + 1,) int64, a chunk of anchors at a time.

    Args:
        path: The file.
        size: N.
    """

    def __init__(self, path: Path, size: int):
        self._file = np.lib.format.open_memmap(path, "w+", np.int64, (size + 1,))
        self._next, self._rows = 0, 0  # rows before anchor ``next``
        self._open = 0  # rows of anchor ``next`` so far

    def add(self, anchors: np.ndarray, low: int) -> None:
        """Take the next rows, by ascending anchors minus ``low``; the last one may have more."""
        last = int(anchors[-1]) + low
        self._end(anchors, low, last)
        start = int(np.searchsorted(anchors, anchors[-1]))
        self._open += len(anchors) - start

    def finish(self) -> None:
        """Write the rest."""
        self._end(np.empty(0, np.int32), 0, len(self._file) - 1)
        self._file.flush()

    def _end(self, anchors: np.ndarray, low: int, stop: int) -> None:
        """Write where anchors end, from ``next`` to ``stop`` - 1."""
        while self._next < stop:
            first, end = self._next, min(self._next + CHUNK, stop)
            # Of the anchors' type, or numpy would convert all of them.
            bounds = np.searchsorted(anchors, np.array([first - low, end - low], anchors.dtype))
            own = anchors[bounds[0] : bounds[1]]
            counts = np.bincount(own - (first - low), minlength=end - first)
            counts[0] += self._open
            self._file[first + 1 : end + 1] = self._rows + np.cumsum(counts)
            self._rows += int(counts.sum())
            self._next, self._open = end, 0
