"""The contents of a store: what is counted for its report, and stores of a part of it.

Shapes: N entities, R relations, K types, M pairs of an entity and a type, T triples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kge_torchrec.data import HEAD, SPLITS, TAIL
from kge_torchrec.data.sort import chunks, id_counts
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.features import FeatureTable
from kge_torchrec.data.store.filter_index import FilterIndex, SideIndex
from kge_torchrec.data.store.writing import (
    finish_store,
    new_store,
    save_labels,
    save_table,
    save_triples,
    write_indices,
)
from kge_torchrec.errors import DataError

EXAMPLES = 5
Types = tuple[pa.Array, np.ndarray, np.ndarray]


def content_report(
    entities: pa.Array,
    relations: pa.Array,
    triples: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Return the entries of a store's report that follow from its contents, except "shared".

    Triples (T, 3) and weights (T,) are by split.
    """
    return {
        "triples": {split: len(triples[split]) for split in SPLITS},
        "duplicates": {},
        "unseen_entities": unseen_entities(entities, triples),
        "unseen_relations": unseen_relations(relations, triples),
        "literals": {},
        "weights": weight_summary(weights),
        "split": None,
    }


def unseen_entities(
    entities: pa.Array, triples: Mapping[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Count the entities without a training triple, and their triples, by split, with examples."""
    in_train = used_entities({"train": triples["train"]}, len(entities))
    counts = {}
    for split in ("valid", "test"):
        is_unseen, affected = np.zeros(len(entities), bool), 0
        for rows in chunks(triples[split]):
            ends = rows[:, 0::2]
            unseen = ~in_train[ends]
            is_unseen[ends[unseen]] = True
            affected += int(unseen.any(1).sum())
        ids = np.flatnonzero(is_unseen)
        if len(ids):
            counts[split] = {
                "entities": len(ids),
                "triples": affected,
                "examples": entities.take(pa.array(ids[:EXAMPLES])).to_pylist(),
            }
    return counts


def used_entities(triples: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """Return which entities are in a triple of any split, (N,) bool."""
    used = np.zeros(count, bool)
    for rows in triples.values():
        for part in chunks(rows):
            used[part[:, HEAD]] = used[part[:, TAIL]] = True
    return used


def unseen_relations(
    relations: pa.Array, triples: Mapping[str, np.ndarray]
) -> dict[str, dict[str, int]]:
    """Count the triples of each relation without a training triple, by split."""
    per_split = {split: id_counts(triples[split][:, 1], len(relations)) for split in SPLITS}
    counts = {}
    for split in ("valid", "test"):
        ids = np.flatnonzero((per_split["train"] == 0) & (per_split[split] > 0))
        if len(ids):
            labels = relations.take(pa.array(ids)).to_pylist()
            counts[split] = dict(zip(labels, per_split[split][ids].tolist(), strict=True))
    return counts


def shared_triples(
    triples: Mapping[str, np.ndarray],
    indices: Mapping[str, Mapping[str, SideIndex]],
    num_entities: int,
    num_relations: int,
) -> dict[str, int]:
    """Count the triples that two splits share, as ``{"train-valid": 3}``."""
    counts = {}
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        if len(triples[first]) == 0 or len(triples[second]) == 0:
            continue
        known = FilterIndex([indices[first]], num_entities, num_relations)
        shared = sum(
            int(known.contains("tail", heads, relations, tails[:, None]).sum())
            for heads, relations, tails in (rows.T for rows in chunks(triples[second]))
        )
        if shared:
            counts[f"{first}-{second}"] = shared
    return counts


def weight_summary(weights: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return the min, mean and max of the weights of each split."""
    return {
        split: {
            "min": float(values.min()),
            "mean": float(values.mean(dtype=np.float64)),
            "max": float(values.max()),
        }
        for split, values in weights.items()
        if len(values)
    }


def triples_inside(
    store: TripleStore, inside: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the triples whose ends are both inside (N,) bool, and their weights, by split.

    The entities inside are numbered in order.
    """
    number = np.cumsum(inside, dtype=np.int64) - 1
    triples, weights = {}, {}
    for split in SPLITS:
        rows, own = store.split(split), store.weights(split)
        parts = [inside[part[:, HEAD]] & inside[part[:, TAIL]] for part in chunks(rows)]
        kept = np.concatenate([np.empty(0, bool), *parts])
        triples[split] = rows[kept]
        for column in (HEAD, TAIL):
            triples[split][:, column] = number[triples[split][:, column]]
        if own is not None:
            weights[split] = own[kept]
    return triples, weights


def types_and_features(
    store: TripleStore, inside: np.ndarray, triples: Mapping[str, np.ndarray]
) -> tuple[Types | None, FeatureTable | None, dict[str, Any]]:
    """Return types and features of the entities inside (N,) bool, and their entries in a report.

    ``triples`` are those of ``triples_inside``.
    """
    types, features = store.types(), store.features()
    notes: dict[str, Any] = {}
    if types is not None:
        names, indptr, ids = types
        counts = np.diff(indptr)
        starts = np.concatenate([[0], np.cumsum(counts[inside])])
        types = names, starts, ids[np.repeat(inside, counts)]
        notes["types"] = _type_report(store.report["types"], types)
    if features is not None and (features := features.inside(inside)) is not None:
        labels = store.entities.array.filter(pa.array(inside))
        used = used_entities(triples, len(labels))
        notes["features"] = {**store.report["features"], **features.counts(labels, used)}
    return types, features, notes


def write_without(store: TripleStore, deleted: np.ndarray, path: Path) -> TripleStore:
    """Write a store without the deleted entities (N,) bool and their triples to a path.

    Relations keep their ids, and the other entities their order.  The new store and its report have
    no label of a deleted entity, and no feature that only such entities had.

    Raises:
        DataError: No training triple is left.
    """
    triples, weights = triples_inside(store, ~deleted)
    if not len(triples["train"]):
        raise DataError("every training triple has one of these entities; nothing would be left")
    types, features, notes = types_and_features(store, ~deleted, triples)
    entities, relations = store.entities.array.filter(pa.array(~deleted)), store.relations.array
    sizes = len(entities), len(relations)
    with new_store(path, overwrite=False) as folder:
        save_labels(folder, entities, relations)
        save_triples(folder, triples, weights)
        indices = write_indices(folder, triples, sizes)
        if types is not None:
            save_table(folder, "types", types)
        if features is not None:
            save_table(folder, "features", features)
        report: dict[str, Any] = {
            **content_report(entities, relations, triples, weights),
            "shared": shared_triples(triples, indices, *sizes),
            "split": store.report["split"],
            "sources": store.report.get("sources", {}),
            "deleted": _deleted(store, deleted, triples),
            **notes,
        }
        finish_store(folder, report)
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
