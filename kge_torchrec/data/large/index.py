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
from kge_torchrec.data.large.work import NpyFile, WorkFolder
from kge_torchrec.data.sort import CHUNK, sorted_rows
from kge_torchrec.data.store.filter_index import SideIndex, keys_of
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
        targets: Files of ``queries``, ``starts`` and ``answers``.
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
        outs = [
            stack.enter_context(_GrowingArray(path, dtype))
            for path, dtype in zip(targets, (np.int64, np.int64, np.int32), strict=True)
        ]
        last, done = -1, 0  # query of the last row, and the rows so far
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
            anchors, relations, answers = sorted_rows(keys, (span, num_relations, num_entities))
            anchors += low
            by_row = keys_of(anchors, relations)
            del anchors, relations
            queries, starts, _ = SideIndex.of_sorted(by_row, answers)
            del by_row
            continued = int(queries[0] == last)  # the bucket before has its first answers
            outs[0].add(queries[continued:])
            outs[1].add(starts[continued:-1] + done)
            outs[2].add(answers)
            last, done = int(queries[-1]), done + len(answers)
            bar.update(len(answers))
        outs[1].add(np.array([done]))
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


class _GrowingArray:
    """A file like that of ``np.save``, to which elements are appended; its header is written last.

    Args:
        path: The file.
        dtype: Of its elements.
    """

    def __init__(self, path: Path, dtype: type):
        self._file, self._dtype, self._length = path.open("wb"), np.dtype(dtype), 0
        self._write_header()

    def add(self, values: np.ndarray) -> None:
        """Append values (M,)."""
        values.astype(self._dtype, copy=False).tofile(self._file)
        self._length += len(values)

    def __enter__(self) -> _GrowingArray:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """Write the header, whose size is the same for every length."""
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
