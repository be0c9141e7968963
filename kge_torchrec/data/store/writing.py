"""Writing a triple store: its contents, and a folder that appears only when complete.

Shapes: T triples, N entities, R relations, M ids.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kge_torchrec import files
from kge_torchrec.data import HEAD, SPLITS, TAIL
from kge_torchrec.data.sort import CHUNK, id_counts
from kge_torchrec.data.store import (
    FEATURE_ARRAYS,
    FEATURES,
    FORMAT,
    FORMAT_VERSION,
    META,
    TYPE_ARRAYS,
    TYPES,
    Vocabulary,
    checksums_of,
    degrees_name,
    index_name,
    weights_name,
)
from kge_torchrec.data.store.filter_index import SideIndex
from kge_torchrec.errors import StoreError


class StoreContents(NamedTuple):
    """The contents of a store.

    Args:
        entities, relations: Labels (N,) and (R,) in order of id.
        triples: (T, 3) by split.
        indices: The filter index by split and side.
        weights: (T,) of the splits that have them.
        types: Names, indptr and types of `EntityTypes`, if there are any.
        features: Names, indptr, ids and weights of `Features`, if there are any.
    """

    entities: pa.Array
    relations: pa.Array
    triples: Mapping[str, np.ndarray]
    indices: Mapping[str, Mapping[str, SideIndex]]
    weights: Mapping[str, np.ndarray] = {}
    types: tuple[pa.Array, np.ndarray, np.ndarray] | None = None
    features: tuple[pa.Array, np.ndarray, np.ndarray, np.ndarray] | None = None


def write_store(
    directory: Path, contents: StoreContents, report: Mapping[str, Any], has_arrays: bool = False
) -> None:
    """Write all files of a store into an existing directory, the meta file last.

    Args:
        directory: The directory.
        contents: What the store has.
        report: Its report.
        has_arrays: Whether all files but the degrees and the meta file are there already.
    """
    if not has_arrays:
        _write_arrays(directory, contents)
    entities, relations, triples, *_, features = contents
    for side, column in (("head", HEAD), ("tail", TAIL)):
        degrees = id_counts(triples["train"][:, column], len(entities))
        np.save(directory / degrees_name(side), degrees)
    meta = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "num_entities": len(entities),
        "num_relations": len(relations),
        "fingerprint": fingerprint(entities, relations, triples, features),
        "report": report,
        "files": {file.name: file.stat().st_size for file in sorted(directory.iterdir())},
        "crc32": checksums_of(sorted(directory.iterdir())),
    }
    (directory / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False), "utf-8")


def _write_arrays(directory: Path, contents: StoreContents) -> None:
    entities, relations, triples, _, weights, types, features = contents
    for table, labels, names in (
        (types, TYPES, TYPE_ARRAYS),
        (features, FEATURES, FEATURE_ARRAYS),
    ):
        if table is not None:
            Vocabulary(table[0]).save(directory / labels)
            for name, array in zip(names, table[1:], strict=True):
                np.save(directory / name, array)
    Vocabulary(entities).save(directory / "entities.arrow")
    Vocabulary(relations).save(directory / "relations.arrow")
    for split in SPLITS:
        np.save(directory / f"{split}.npy", triples[split])
        if split in weights:
            np.save(directory / weights_name(split), weights[split].astype(np.float32, copy=False))
        for side, index in contents.indices[split].items():
            for part, array in zip(SideIndex._fields, index, strict=True):
                np.save(directory / index_name(split, side, part), array)


def fingerprint(
    entities: pa.Array,
    relations: pa.Array,
    triples: Mapping[str, np.ndarray],
    features: tuple[pa.Array, np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> str:
    """Return a hash of what gives ids their meaning: labels in order, triples, and features."""
    digest = hashlib.sha256()
    for array in () if features is None else features[1:]:
        digest.update(np.ascontiguousarray(array).data)
    for labels in (entities, relations, *(() if features is None else features[:1])):
        starts = np.frombuffer(labels.buffers()[1], np.int64, len(labels) + 1)
        for first in range(0, len(labels), CHUNK):
            digest.update(np.diff(starts[first : first + CHUNK + 1]).astype(np.int32).tobytes())
        digest.update(labels.buffers()[2] or b"")
    for split in SPLITS:
        digest.update(f"{split} {len(triples[split])}\n".encode())
        digest.update(np.ascontiguousarray(triples[split]).data)
    return digest.hexdigest()


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
    """Open a temporary directory that takes the place of ``output`` when the block succeeds."""
    check_writable(output, overwrite)
    output = output.resolve()  # a symbolic link stays: the store is put where it leads
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.partial_of(output)
    temporary.mkdir()
    try:
        yield temporary
        check_writable(output, overwrite)  # somebody may have made one meanwhile
        files.put_in_place(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
