"""What `prepare` found out about the data."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from kge_torchrec.data.filter_index import FilterIndex, SideIndex
from kge_torchrec.data.readers import SPLITS
from kge_torchrec.data.sort import id_counts

EXAMPLES = 5


def unseen_entities(
    entities: pa.Array, triples: Mapping[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Per split: entities (number and examples) without a training triple, and their triples."""
    seen = np.zeros(len(entities), bool)
    for column in (0, 2):
        seen[triples["train"][:, column]] = True
    found = {}
    for split in ("valid", "test"):
        ends = triples[split][:, 0::2]
        unseen = ~seen[ends]
        ids = np.unique(ends[unseen])
        if len(ids):
            found[split] = {
                "entities": len(ids),
                "triples": int(unseen.any(1).sum()),
                "examples": entities.take(pa.array(ids[:EXAMPLES])).to_pylist(),
            }
    return found


def unseen_relations(
    relations: pa.Array, triples: Mapping[str, np.ndarray]
) -> dict[str, dict[str, int]]:
    """Per split: relations without a training triple, with the number of their triples there."""
    count = {split: id_counts(triples[split][:, 1], len(relations)) for split in SPLITS}
    found = {}
    for split in ("valid", "test"):
        ids = np.flatnonzero((count["train"] == 0) & (count[split] > 0))
        if len(ids):
            labels = relations.take(pa.array(ids)).to_pylist()
            found[split] = dict(zip(labels, count[split][ids].tolist(), strict=True))
    return found


def leaks(
    triples: Mapping[str, np.ndarray],
    indices: Mapping[str, Mapping[str, SideIndex]],
    num_entities: int,
    num_relations: int,
) -> dict[str, int]:
    """Numbers of triples that two splits share, as ``{"train-valid": 3}``."""
    found = {}
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        if len(triples[first]) == 0 or len(triples[second]) == 0:
            continue
        known = FilterIndex([indices[first]], num_entities, num_relations)
        heads, relations, tails = triples[second].T
        shared = int(known.contains("tail", heads, relations, tails[:, None]).sum())
        if shared:
            found[f"{first}-{second}"] = shared
    return found


def notes(report: Mapping[str, Any], keep_literals: str = "data.literals keep") -> list[str]:
    """What a person should know about the data before reading results, a sentence each.

    keep_literals: what that person types to keep them.
    """
    out = []
    for split, found in (report.get("unseen_entities") or {}).items():
        out.append(
            f"{split}: {found['entities']:,} entities never occur in train; their "
            f"{found['triples']:,} triples stay in"
        )
    for split, count in (report.get("duplicates") or {}).items():
        if count:
            out.append(f"{split}: {count:,} duplicate triples were dropped")
    for split, count in (report.get("literals") or {}).items():
        out.append(
            f"{split}: {count:,} triples with a literal as object were dropped; {keep_literals} "
            "takes them"
        )
    for split, found in (report.get("weights") or {}).items():
        out.append(
            f"{split}: triples weigh from {found['min']:.4g} to {found['max']:.4g}, on average "
            f"{found['mean']:.4g}; data.weights says what for"
        )
    types = report.get("types")
    if types:
        out.append(
            f"types: {types['triples']:,} triples of {types['relation']} say {types['types']:,} "
            f"types of {types['entities']:,} entities, and "
            + ("stay in" if types["use"] == "keep" else "were taken out")
        )
    for splits, count in (report.get("shared") or {}).items():
        if count:
            out.append(f"{splits}: {count:,} triples occur in both")
    for split, found in (report.get("unseen_relations") or {}).items():
        out.append(f"{split}: relations without a training triple: {', '.join(found)}")
    return out
