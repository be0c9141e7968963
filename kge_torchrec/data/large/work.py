"""The folder of a preparation on disk: finished stages, files of arrays, progress.

The folder lies beside the new store.  Each finished stage is noted in ``state.json``, so that a
preparation that was killed resumes behind the last one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from kge_torchrec.data.reading import hidden
from kge_torchrec.errors import StoreError
from kge_torchrec.files import lock, replacing, sync, write_json

STATE, STORE = "state.json", "store"


class WorkFolder:
    """Files of a preparation that has not ended yet.

    Args:
        path: The folder.
        key: What the files depend on: sources, options, formats.
        progress: Whether to show how far a stage is.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], progress: bool):
        self.path, self._key, self._progress = path, json.loads(json.dumps(key)), progress
        self._done: dict[str, Any] = {}
        self.started_over = ""  # why an earlier start is of no use

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Open the folder for this process only, with the stages of an earlier start.

        Raises:
            StoreError: Another process prepares the same store.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a") as file:
            _lock(file, self.path)
            self._open()
            (self.path / STORE).mkdir(exist_ok=True)
            yield

    def _open(self) -> None:
        state: dict[str, Any] = {}
        try:
            state = json.loads((self.path / STATE).read_text("utf-8"))
            before = state["key"]
            self._done = state["done"] if before == self._key else {}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            self.started_over = f"{STATE} is damaged"
        else:
            if before != self._key:
                changed = [name for name in self._key if before.get(name) != self._key[name]]
                self.started_over = f"{', '.join(changed) or 'the format'} changed"
            elif not (self.path / STORE).is_dir():  # killed after the store was put in place
                self.started_over, self._done = "the store was finished", {}
        if not state or self.started_over:
            self._remove_content()
            self._save()

    def _remove_content(self) -> None:
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _save(self) -> None:
        write_json(self.path / STATE, {"key": self._key, "done": self._done})

    @property
    def resumes(self) -> list[str]:
        """The stages that an earlier start has finished."""
        return list(self._done)

    def once(self, stage: str, make: Callable[[], Any], *obsolete: str) -> Any:
        """Return the result of a stage, which an earlier start may have finished.

        Args:
            stage: Its name.
            make: Writes all files of the stage, and returns a value for JSON.
            obsolete: Patterns of files that no later stage needs.
        """
        if stage not in self._done:
            result = json.loads(json.dumps(make()))
            for path in self.path.rglob("*"):
                sync(path)
            self._done[stage] = result
            self._save()
        for pattern in obsolete:
            for path in self.path.glob(pattern):
                path.unlink()
        return self._done[stage]

    def bar(self, stage: str, total: int, unit: str) -> tqdm:
        """Return the progress bar of a stage."""
        return tqdm(
            total=total, desc=stage, unit=unit, unit_scale=True, disable=hidden(self._progress)
        )

    def check_space(self, triples: int, text_bytes: int) -> None:
        """Raise StoreError if the disk has too little space; finished stages stay."""
        there = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        needed = DISK_PER_TRIPLE * triples + DISK_PER_BYTE * text_bytes - there
        free = shutil.disk_usage(self.path).free
        if needed > free:
            if not self._done:
                self.remove()
            raise StoreError(
                f"{self.path.parent}: preparing about {triples:,} triples takes "
                f"{needed / 1e9:,.1f} GB here, and {free / 1e9:,.1f} GB are free; choose a store "
                "on a larger disk"
            )


# Measured, see docs/explanation/performance.md: the peak of the folder over the size of the data.
DISK_PER_TRIPLE, DISK_PER_BYTE = 40, 0.8


def _lock(file: IO[str], folder: Path) -> None:
    with suppress(OSError):  # a file system without locks
        if not lock(file):
            raise StoreError(
                f"{folder}: another process prepares this store; wait until it ends, or choose "
                "another output"
            )


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], **info: Any) -> None:
    """Write one file of several arrays, whole or not at all; ``Arrays`` reads it."""
    places, place = {}, 0
    for name, array in arrays.items():
        places[name] = [place, array.size, array.dtype.str]
        place += array.nbytes
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(json.dumps({"arrays": places, "info": info}).encode() + b"\n")
        for array in arrays.values():
            array.tofile(file)


class Arrays:
    """A file of ``write_arrays``, of which parts are read.

    Attributes:
        info: What was written with the arrays.
    """

    def __init__(self, path: Path):
        with path.open("rb") as file:
            line = file.readline()
        header = json.loads(line)
        self._path, self._start, self._places = path, len(line), header["arrays"]
        self.info: dict[str, Any] = header["info"]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the elements from ``start`` to ``stop`` - 1 of an array, in memory."""
        place, size, kind = self._places[name]
        dtype = np.dtype(kind)
        count = (size if stop is None else stop) - start
        return np.fromfile(
            self._path, dtype, count, offset=self._start + place + start * dtype.itemsize
        )


class NpyFile:
    """A file of ``np.save``, of which rows are read into memory.

    A mapped file would count as resident memory of this process.
    """

    def __init__(self, path: Path):
        self.path = path
        mapped = np.load(path, mmap_mode="r")
        self.shape, self.dtype, self._start = mapped.shape, mapped.dtype, mapped.offset
        self._width = int(np.prod(self.shape[1:], dtype=np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the rows from ``start`` to ``stop`` - 1, or to the last one."""
        count = max(0, min(stop, len(self)) - start)
        offset = self._start + start * self._width * self.dtype.itemsize
        rows = np.fromfile(self.path, self.dtype, count * self._width, offset=offset)
        return rows.reshape(count, *self.shape[1:])

    def chunks(self, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all rows in pieces of ``size``, each with the number of its first row."""
        for start in range(0, len(self), size):
            yield start, self.read(start, start + size)


@contextmanager
def npy_writer(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[IO[bytes]]:
    """Open a file like that of ``np.save``, to which rows are appended with ``tofile``."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        yield file
