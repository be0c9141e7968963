"""Small graphs that are prepared on disk like large ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from kge_torchrec.data import large, sort
from kge_torchrec.data.large import index, on_disk, rows
from kge_torchrec.data.readers import delimited
from kge_torchrec.data.store import writing as store_writing


@contextmanager
def tiny_bounds(block: int = 1500, free: int = 16_000, chunk: int = 64) -> Iterator[None]:
    """Take every graph for large; bytes of a batch and of memory, rows of a chunk."""
    changes = [
        mock.patch.object(large, "IN_MEMORY", 1 << 60),
        mock.patch.object(delimited, "BLOCK_BYTES", block),
        mock.patch.object(on_disk, "OTHERS", 2 - free / 2**30),
        mock.patch.object(on_disk, "PER_ENTITY", 0),
        mock.patch.object(rows, "CHUNK", chunk),
        mock.patch.object(index, "CHUNK", chunk),
        mock.patch.object(index, "SAMPLES", 4),
        mock.patch.object(sort, "CHUNK", chunk),
        mock.patch.object(store_writing, "CHUNK", chunk),
    ]
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


NAMES = {
    "plain": lambda number: f"entity {number}",
    "numbers": lambda number: str(number) if number % 3 == 0 else f"entity {number}",
    "accents": lambda number: ("e\u0301 " if number % 2 else "é ") + str(number // 2),
}


def write(path: Path, triples, weighted: bool = False, names: str = "plain") -> Path:
    name = NAMES[names]
    lines = (
        f"{name(h)}\trelation {r}\t{name(t)}" + (f"\t{w}" if weighted else "")
        for h, r, t, w in triples
    )
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return path


def some_triples(count: int = 400, seed: int = 0, entities: int = 90) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    columns = (random.random((count, 4)) ** 2 * [entities, 5, entities, 9]).astype(int)
    return [(h, r, t, w + 1) for h, r, t, w in columns.tolist()]


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
