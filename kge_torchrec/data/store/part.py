"""A part of a store: some of its entities, and the triples among them.

Shapes: N entities, K types, M pairs of an entity and a type, T triples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kge_torchrec.data import HEAD, SPLITS, TAIL
from kge_torchrec.data.report import content_report, leaks
from kge_torchrec.data.sort import CHUNK
from kge_torchrec.data.store import StoreContents, TripleStore, new_store, write_store
from kge_torchrec.data.store.filter_index import build_indices
from kge_torchrec.errors import DataError

Types = tuple[pa.Array, np.ndarray, np.ndarray]


def triples_inside(
    store: TripleStore, inside: np.ndarray, splits: Iterable[str] = SPLITS
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the triples whose ends are both inside, with new ids of entities, and their weights.

    Args:
        store: The store.
        inside: (N,) bool, the entities of the part; they are numbered in order.
        splits: The splits to read.

    Returns:
        Triples (T, 3) by split, and weights (T,) of the splits that have some.
    """
    number = np.cumsum(inside, dtype=np.int64) - 1
    triples, weights = {}, {}
    for split in splits:
        rows, own = store.split(split), store.weights(split)
        parts = [
            inside[part[:, HEAD]] & inside[part[:, TAIL]]
            for part in (rows[first : first + CHUNK] for first in range(0, len(rows), CHUNK))
        ]
        kept = np.concatenate([np.empty(0, bool), *parts])
        triples[split] = rows[kept]
        for column in (HEAD, TAIL):
            triples[split][:, column] = number[triples[split][:, column]]
        if own is not None:
            weights[split] = own[kept]
    return triples, weights


def types_inside(types: Types | None, inside: np.ndarray) -> Types | None:
    """Return names (K,), indptr (N + 1,) and types (M,) of the entities that are inside."""
    if types is None:
        return None
    names, indptr, ids = types
    counts = np.diff(indptr)
    starts = np.concatenate([[0], np.cumsum(counts[inside])])
    return names, starts, ids[np.repeat(inside, counts)]


def write_without(store: TripleStore, deleted: np.ndarray, path: Path) -> TripleStore:
    """Write a store without some entities and without their triples.

    Relations keep their ids, and the other entities their order.  The new store and its report have
    no label of a deleted entity.

    Args:
        store: The store.
        deleted: (N,) bool, the entities to leave out.
        path: The folder of the new store.

    Raises:
        DataError: No training triple is left.
    """
    triples, weights = triples_inside(store, ~deleted)
    if not len(triples["train"]):
        raise DataError("every training triple has one of these entities; nothing would be left")
    types = types_inside(store.types(), ~deleted)
    entities = store.entities.array.filter(pa.array(~deleted))
    contents = entities, store.relations.array, triples
    with new_store(path, overwrite=False) as directory:
        indices = build_indices(triples, len(entities), store.num_relations)
        report: dict[str, Any] = {
            **content_report(*contents, weights),
            "shared": leaks(triples, indices, len(entities), store.num_relations),
            "split": store.report.get("split"),
            "sources": store.report.get("sources", {}),
            "deleted": _deleted(store, deleted, triples),
        }
        if types is not None:
            report["types"] = _type_report(store.report["types"], types)
        write_store(directory, StoreContents(*contents, indices, weights, types), report)
    return TripleStore.open(path)


def _deleted(
    store: TripleStore, deleted: np.ndarray, left: Mapping[str, np.ndarray]
) -> dict[str, int]:
    """Return how many entities and triples were deleted, now and before."""
    before = store.report.get("deleted", {"entities": 0, "triples": 0})
    triples = sum(len(store.split(split)) - len(left[split]) for split in SPLITS)
    return {
        "entities": before["entities"] + int(deleted.sum()),
        "triples": before["triples"] + triples,
    }


def _type_report(before: Mapping[str, Any], types: Types) -> dict[str, Any]:
    names, indptr, ids = types
    counts: dict[str, Any] = {"entities": int((np.diff(indptr) > 0).sum())}
    if "sizes" in before:
        sizes = np.bincount(ids, minlength=len(names)).tolist()
        counts["sizes"] = dict(zip(names.to_pylist(), sizes, strict=True))
    return {**before, **counts}
