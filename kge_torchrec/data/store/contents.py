"""Complete a store: tables and index beside its triples, and the report; stores of a part of it.

Shapes: N entities, R relations, K types, M pairs of an entity and a type, T triples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kge_torchrec.data import HEAD, SPLITS, TAIL
from kge_torchrec.data.sort import chunks, id_counts
from kge_torchrec.data.store import (
    FORMAT,
    FORMAT_VERSION,
    META,
    TABLES,
    TripleStore,
    Vocabulary,
    checksum_of,
    checksums_of,
    weights_name,
)
from kge_torchrec.data.store.attributes import Attributes
from kge_torchrec.data.store.filter_index import FilterIndex, SideIndex
from kge_torchrec.data.store.writing import ALL_ROWS, new_store, write_indices
from kge_torchrec.errors import DataError

EXAMPLES = 5


def finish_store(
    folder: Path,
    entities: pa.Array,
    relations: pa.Array,
    notes: Mapping[str, Any],
    types: Attributes | None = None,
    features: Attributes | None = None,
    most: int = ALL_ROWS,
) -> None:
    """Write all files of a store, whose triples and their weights are in a folder already.

    ``notes`` are entries of the report, beside those that follow from the contents.
    """
    Vocabulary(entities).save(folder / "entities.arrow")
    Vocabulary(relations).save(folder / "relations.arrow")
    for kind, table in (("types", types), ("features", features)):
        if table is not None:
            Vocabulary(table.names).save(folder / f"{kind}.arrow")
            for part in TABLES[kind]:
                np.save(folder / f"{kind}-{part}.npy", getattr(table, part))
    triples, weights = map_triples(folder)
    indices = write_indices(folder, triples, len(entities), most)
    report: dict[str, Any] = {
        "triples": {split: len(rows) for split, rows in triples.items()},
        "duplicates": {},
        "unseen_entities": unseen_entities(entities, triples),
        "unseen_relations": unseen_relations(relations, triples),
        "literals": {},
        "weights": {
            split: {
                "min": float(values.min()),
                "mean": float(values.mean(dtype=np.float64)),
                "max": float(values.max()),
            }
            for split, values in weights.items()
            if len(values)
        },
        "split": None,
        **notes,
    }
    # Triples that were split here are distinct.
    report["shared"] = {} if report["split"] else shared_triples(triples, indices)
    if types is not None:
        counts = np.bincount(types.ids, minlength=len(types.names)).tolist()
        report["types"] = {
            **report["types"],
            "types": len(types.names),
            "entities": int((np.diff(types.indptr) > 0).sum()),
        }
        if "ends" in report["types"]:
            report["types"]["sizes"] = dict(zip(types.names.to_pylist(), counts, strict=True))
    if features is not None:
        has_features = np.diff(features.indptr) > 0
        lone = has_features & ~used_entities(triples, len(entities))
        report["features"] = {
            **report["features"],
            "features": len(features.names),
            "pairs": len(features.ids),
            "entities": int(has_features.sum()),
            "without_triples": int(lone.sum()),
            "example": entities[int(lone.argmax())].as_py() if lone.any() else None,
        }
    paths = sorted(folder.iterdir())
    checksums = checksums_of(paths)
    give_meaning = ("entities", "relations", "features", *SPLITS)
    of_ids = [(name, x) for name, x in checksums.items() if name.startswith(give_meaning)]
    meta = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "num_entities": len(entities),
        "num_relations": len(relations),
        "fingerprint": hashlib.sha256(repr(of_ids).encode()).hexdigest(),
        "report": report,
        "files": {path.name: path.stat().st_size for path in paths},
        "crc32": checksums,
    }
    meta["checksum"] = checksum_of(meta)
    (folder / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False), "utf-8")


def map_triples(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the triples (T, 3) of each split in a folder, and the weights (T,), mapped."""
    triples = {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in SPLITS}
    paths = {split: folder / weights_name(split) for split in SPLITS}
    return triples, {s: np.load(path, mmap_mode="r") for s, path in paths.items() if path.exists()}


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
    triples: Mapping[str, np.ndarray], indices: Mapping[str, Mapping[str, SideIndex]]
) -> dict[str, int]:
    """Count the triples that two splits share, as ``{"train-valid": 3}``."""
    counts = {}
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        if len(triples[first]) == 0 or len(triples[second]) == 0:
            continue
        known = FilterIndex([indices[first]])
        shared = sum(
            int(known.contains("tail", heads, relations, tails[:, None]).sum())
            for heads, relations, tails in (rows.T for rows in chunks(triples[second]))
        )
        if shared:
            counts[f"{first}-{second}"] = shared
    return counts


def write_without(store: TripleStore, deleted: np.ndarray, path: Path) -> TripleStore:
    """Write a store without the deleted entities (N,) bool and their triples to a path.

    Relations keep their ids, and the other entities their order.  The new store and its report have
    no label of a deleted entity, and no feature that only such entities had.

    Raises:
        DataError: No training triple is left.
    """
    inside, gone = ~deleted, 0
    number = np.cumsum(inside, dtype=np.int32) - 1
    arrays: dict[str, np.ndarray] = {}
    for split in SPLITS:
        rows, weights = store.split(split), store.weights(split)
        kept = inside[rows[:, ::2]].all(1)
        own = rows[kept]
        own[:, ::2] = number[own[:, ::2]]
        arrays[split], gone = own, gone + len(rows) - len(own)
        if weights is not None:
            arrays[weights_name(split).removesuffix(".npy")] = weights[kept]
    if not len(arrays["train"]):
        raise DataError("every training triple has one of these entities; nothing would be left")
    before = store.report.get("deleted", {"entities": 0, "triples": 0})
    notes: dict[str, Any] = {
        "split": store.report["split"],
        "sources": store.report.get("sources", {}),
        "deleted": {
            "entities": before["entities"] + int(deleted.sum()),
            "triples": before["triples"] + gone,
        },
    }
    types, features = store.types(), store.features()
    if types is not None:
        types, notes["types"] = types.inside(inside), store.report["types"]
    if features is not None:
        features = features.inside(inside).without_unused()
        if len(features.names):
            notes["features"] = store.report["features"]
        else:
            features = None
    with new_store(path, overwrite=False) as folder:
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        entities = store.entities.array.filter(pa.array(inside))
        finish_store(folder, entities, store.relations.array, notes, types, features)
    return TripleStore.open(path)
