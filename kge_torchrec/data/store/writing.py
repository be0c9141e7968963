"""The filter index of a store on disk, and a folder that appears only when complete.

Shapes: T triples, N entities, R relations.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from kge_torchrec import files
from kge_torchrec.data import HEAD, RELATION, SIDES, TAIL
from kge_torchrec.data.sort import id_counts, pack, pieces, sorted_rows
from kge_torchrec.data.store import (
    META,
    degrees_name,
    index_name,
    weights_name,
)
from kge_torchrec.data.store.filter_index import SideIndex, keys_of
from kge_torchrec.errors import StoreError

SAMPLES = 512  # rows of the sample for each part of an index
ALL_ROWS = 1 << 62  # rows in memory where nothing bounds them


def save_triples(
    folder: Path, triples: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]
) -> None:
    """Write the triples (T, 3) of each split, and the weights (T,) of those that have some."""
    for split, rows in triples.items():
        np.save(folder / f"{split}.npy", rows)
    for split, own in weights.items():
        np.save(folder / weights_name(split), own.astype(np.float32, copy=False))


def write_indices(
    folder: Path,
    triples: Mapping[str, np.ndarray],
    sizes: tuple[int, int],
    most: int = ALL_ROWS,
) -> dict[str, dict[str, SideIndex]]:
    """Write the filter index of each split and side, and return it, mapped; write degrees too.

    ``sizes`` are N and R, and ``most`` is the number of rows in memory.
    """
    indices: dict[str, dict[str, SideIndex]] = {}
    for split, rows in triples.items():
        indices[split] = {}
        for side in SIDES:
            paths = [folder / index_name(split, side, part) for part in SideIndex._fields]
            _write_side(paths, rows, side, sizes, most)
            indices[split][side] = SideIndex(*(np.load(path, mmap_mode="r") for path in paths))
    for side, column in (("head", HEAD), ("tail", TAIL)):
        np.save(folder / degrees_name(side), id_counts(triples["train"][:, column], sizes[0]))
    return indices


def _write_side(
    paths: list[Path], rows: np.ndarray, side: str, sizes: tuple[int, int], most: int
) -> None:
    """Write the index that answers queries for a side, as `filter_index.build_side` returns it.

    Rows are spread over parts by keys that a sample has at equal distances, and each part is sorted
    in memory.
    """
    columns = [HEAD, RELATION, TAIL] if side == "tail" else [TAIL, RELATION, HEAD]
    total = len(rows)
    count = -(-total * 5 // (4 * most)) if total > most else 1
    random = np.random.default_rng(0)  # any sample gives the same index
    sample = rows[np.sort(random.integers(0, total, SAMPLES * count))] if count > 1 else rows[:0]
    keys = np.sort(_keys(sample, columns, sizes))
    limits = keys[np.arange(1, count) * len(keys) // count]

    def part_of(part: np.ndarray) -> np.ndarray:
        return np.searchsorted(limits, _keys(part, columns, sizes), "right")

    last, done = -1, 0  # the query of the last row, and the rows so far
    with ExitStack() as stack:
        queries, starts, answers = (
            stack.enter_context(_GrowingArray(path, dtype))
            for path, dtype in zip(paths, (np.int64, np.int64, np.int32), strict=True)
        )
        for part, _ in pieces(rows, part_of, count, paths[0].parent):
            if not len(part):
                continue
            anchors, relations, others = (part[:, column] for column in columns)
            low = int(anchors.min())  # shorter keys: those of one part have close anchors
            own_sizes = int(anchors.max()) - low + 1, sizes[1], sizes[0]
            anchors, relations, others = sorted_rows((anchors - low, relations, others), own_sizes)
            anchors += low
            by_row = keys_of(anchors, relations)
            del anchors, relations
            own = SideIndex.of_sorted(by_row, others)
            continues = int(own.queries[0] == last)  # the part before has its first answers
            queries.add(own.queries[continues:])
            starts.add(own.starts[continues:-1] + done)
            answers.add(others)
            last, done = int(own.queries[-1]), done + len(others)
        starts.add(np.array([done]))


class _GrowingArray:
    """A file like that of ``np.save`` to which elements are appended; the header comes last."""

    def __init__(self, path: Path, dtype: type):
        self._file, self._dtype, self._length = path.open("wb"), np.dtype(dtype), 0
        self._write_header()

    def add(self, values: np.ndarray) -> None:
        """Append values (M,)."""
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
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


def _keys(rows: np.ndarray, columns: list[int], sizes: tuple[int, int]) -> np.ndarray:
    """Return a number (M,) per row that orders like its columns, or like the first two of them."""
    anchors, relations, answers = (rows[:, column] for column in columns)
    keys = pack((anchors, relations, answers), (sizes[0], sizes[1], sizes[0]))
    if keys is None:
        keys = pack((anchors, relations), sizes)
    assert keys is not None  # two ids of 32 bits
    return keys


def check_writable(output: Path, overwrite: bool) -> None:
    """Raise StoreError unless a store may be written to ``output``."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / META).is_file():
        raise StoreError(f"{output}: exists and is no store; choose another output")
    if not overwrite:
        raise StoreError(
            f"{output}: a store exists here; choose another path, or replace it with --overwrite "
            "(overwrite=True)"
        )


@contextmanager
def new_store(output: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that takes the place of ``output`` when the block succeeds.

    Folders that killed processes left beside it are removed.
    """
    check_writable(output, overwrite)
    output = output.resolve()  # a symbolic link stays: the store is put where it leads
    output.parent.mkdir(parents=True, exist_ok=True)
    for folder in output.parent.glob(f".{glob.escape(output.name)}.partial-*"):
        with suppress(FileNotFoundError), _locked(folder) as is_abandoned:
            if is_abandoned:
                shutil.rmtree(folder, ignore_errors=True)
    temporary = files.partial_of(output)
    temporary.mkdir()
    try:
        with _locked(temporary):
            yield temporary
            check_writable(output, overwrite)  # somebody may have made one meanwhile
            files.put_in_place(temporary, output)
    except OSError as error:
        if error.filename is None:  # of a write to an open file
            error.filename = str(output)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder until the end of the block or of the process; yield whether it was free."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield files.lock(handle)
    finally:
        os.close(handle)
