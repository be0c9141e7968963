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
from kge_torchrec.data import OTHER, SIDES, Side, answer_column
from kge_torchrec.data.labels import mapped
from kge_torchrec.data.sort import id_counts, pieces_by_id
from kge_torchrec.data.store import META, degrees_name, index_name
from kge_torchrec.data.store.filter_index import SideIndex, build_side
from kge_torchrec.errors import StoreError

ALL_ROWS = 1 << 62  # rows in memory where nothing bounds them


def write_indices(
    folder: Path,
    triples: Mapping[str, np.ndarray],
    num_entities: int,
    most: int = ALL_ROWS,
) -> dict[str, dict[str, SideIndex]]:
    """Write the filter index of each split and side, and return it, mapped; write degrees too.

    ``most`` is the number of rows in memory; an entity with more triples takes more.
    """
    indices: dict[str, dict[str, SideIndex]] = {}
    for split, rows in triples.items():
        indices[split] = {}
        for side in SIDES:
            paths = [folder / index_name(split, side, part) for part in SideIndex._fields]
            degrees = _write_side(paths, rows, side, num_entities, most)
            if split == "train":
                np.save(folder / degrees_name(OTHER[side]), degrees)
            indices[split][side] = SideIndex(*(np.load(path, mmap_mode="r") for path in paths))
    return indices


def _write_side(
    paths: list[Path], rows: np.ndarray, side: Side, num_entities: int, most: int
) -> np.ndarray:
    """Write the index of queries for a side; return how many triples each anchor has, (N,)."""
    folder, column, done = paths[0].parent, answer_column(OTHER[side]), 0
    degrees = id_counts(rows[:, column], num_entities)
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in paths]
        for part, _ in pieces_by_id(rows, column, degrees, most, folder):
            own = build_side(side, part)
            arrays = own.queries, own.starts[:-1] + done, own.answers
            for file, array in zip(files, arrays, strict=True):
                file.write(array.data)
            done += len(part)
        files[1].write(np.int64(done).tobytes())
        for path, file, dtype in zip(paths, files, (np.int64, np.int64, np.int32), strict=True):
            np.save(path, mapped(file, dtype))
    return degrees


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
