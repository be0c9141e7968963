"""The rows of one source as `prepare` reads them, and what is said of it; triples of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data.reading import Source, open_sources
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError


def read(path: Path | str, times: bool = False, **data: Any) -> tuple[list[tuple], Source]:
    """Return the rows, with the weight and the time if there are some, and their read source."""
    source = open_sources(str(path), DataConfig(**{"literals": "keep", **data}), times, False)
    return [
        tuple(row.values()) for _, batch in source.batches() for row in batch.to_pylist()
    ], source


def rows_of(path: Path | str, **options: Any) -> list[tuple]:
    return read(path, **options)[0]


def fault_of(path: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        rows_of(path, **options)
    return str(caught.value)


def labelled(store: TripleStore, split: str = "train") -> list[tuple[str, str, str]]:
    """Return the triples of a split as labels, in their order."""
    entities, relations = store.entities.array.to_pylist(), store.relations.array.to_pylist()
    return [(entities[h], relations[r], entities[t]) for h, r, t in store.split(split).tolist()]
