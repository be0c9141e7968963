"""The filter index of a store on disk, and a folder that appears only when complete.

Shapes: T triples, N entities, R relations.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from kge_torchrec import files
from kge_torchrec.data import HEAD, RELATION, TAIL
from kge_torchrec.data.labels import mapped
from kge_torchrec.data.sort import id_counts, pieces_by_id, sorted_rows
from kge_torchrec.data.store import META, degrees_name, index_name
from kge_torchrec.data.store.filter_index import SideIndex, keys_of
from kge_torchrec.errors import StoreError

ALL_ROWS = 1 << 62  # rows in memory where nothing bounds them


def write_indices(
    folder: Path,
    triples: Mapping[str, np.ndarray],
    sizes: tuple[int, int],
    most: int = ALL_ROWS,
) -> dict[str, dict[str, SideIndex]]:
    """Write the filter index of each split and side, and return it, mapped; write degrees too.

    ``sizes`` are N and R, and ``most`` is the number of rows in memory; an entity with more triples
    takes more.
    """
    indices: dict[str, dict[str, SideIndex]] = {}
    for split, rows in triples.items():
        indices[split] = {}
        for side, column in (("tail", HEAD), ("head", TAIL)):
            degrees = id_counts(rows[:, column], sizes[0])
            if split == "train":
                np.save(folder / degrees_name("head" if column == HEAD else "tail"), degrees)
            paths = [folder / index_name(split, side, part) for part in SideIndex._fields]
            _write_side(paths, rows, column, degrees, sizes, most)
            indices[split][side] = SideIndex(*(np.load(path, mmap_mode="r") for path in paths))
    return indices


def _write_side(
    paths: list[Path],
    rows: np.ndarray,
    column: int,
    degrees: np.ndarray,
    sizes: tuple[int, int],
    most: int,
) -> None:
    """Write the index of queries with the anchors of a column, as `build_side` returns it.

    Ranges of anchors are sorted one after another.
    """
    folder, done = paths[0].parent, 0
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in paths]
        for part, _ in pieces_by_id(rows, column, degrees, most, folder):
            if not len(part):
                continue
            anchors, relations, answers = (part[:, x] for x in (column, RELATION, TAIL - column))
            low = int(anchors.min())  # shorter keys: those of one part have close anchors
            own_sizes = int(anchors.max()) - low + 1, sizes[1], sizes[0]
            anchors, relations, answers = sorted_rows(
                (anchors - low, relations, answers), own_sizes
            )
            anchors += low
            by_row = keys_of(anchors, relations)
            del anchors, relations
            own = SideIndex.of_sorted(by_row, answers)
            for file, values in zip(
                files, (own.queries, own.starts[:-1] + done, answers), strict=True
            ):
                file.write(values.data)
            done += len(answers)
        files[1].write(np.int64(done).tobytes())
        for path, file, dtype in zip(paths, files, (np.int64, np.int64, np.int32), strict=True):
            np.save(path, mapped(file, dtype))


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
