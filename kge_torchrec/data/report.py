"""Notes on the data of a store, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kge_torchrec.data import SPLITS
from kge_torchrec.data.leaks import find_leaks
from kge_torchrec.data.readers.files import WHOLE
from kge_torchrec.data.store import TripleStore

MANY = 0.1  # share of duplicates that may be counts


def notes(store: TripleStore) -> list[str]:
    """Return what a person should know about the data before reading results, in sentences."""
    return [*_reading(store), *_columns(store), *_splits(store.report)]


def _reading(store: TripleStore) -> Iterator[str]:
    """Yield how files were read, in one sentence for files that are alike, and what lacks."""
    report = store.report
    places: dict[str, list[str]] = {}
    for place, said in report.get("reading") or ():
        places.setdefault(said, []).append(place)
    for said, alike in places.items():
        more = f" ({len(alike) - 1:,} more files alike)" if len(alike) > 1 else ""
        yield f"{alike[0]}{more}: {said}"
    split = report["split"] or {}
    shares = [True, *split.get("ratio", (1, 1, 1))[1:]]
    missing = [s for s, x in zip(SPLITS, shares, strict=True) if x and not len(store.split(s))]
    if missing:
        effect = "nothing is ranked" if "test" in missing else "the last checkpoint is the best"
        why = "name files so, or give one file, which is divided"
        if split:
            why = "train needs all triples, to have every entity, relation or head; give more"
        yield f"{' and '.join(missing)}: no triples, so that {effect}; {why}"
    features = report.get("features") or {}
    if count := features.get("without_triples"):  # a wrong label would be among them
        yield (
            f"{features['source']}: {count:,} of its entities are in no triple, such as "
            f"{features['example']!r}; they become entities that their features alone describe"
        )


def _columns(store: TripleStore) -> Iterator[str]:
    """Yield what became of literals, weights and types."""
    report = store.report
    for split, count in report["literals"].items():
        yield (
            f"{split}: {count:,} triples with a literal as object were dropped; data.literals keep "
            "takes them"
        )
    if weights := report["weights"].get("train"):
        yield (
            f"train: triples weigh from {weights['min']:.4g} to {weights['max']:.4g}, on average "
            f"{weights['mean']:.4g}; data.weights loss trains with that"
        )
    types = report.get("types")
    if types and "ends" in types:
        sizes = ", ".join(f"{count:,} {name}" for name, count in types["sizes"].items())
        yield f"types: every entity has one: {sizes}"
    elif types and (table := store.types()):
        counts = np.diff(table.indptr)
        odd = [
            f"; {mask.sum():,} have {what}, such as {store.entities[int(mask.argmax())]!r}"
            for what, mask in (("none", counts == 0), ("several", counts > 1))
            if mask.any()
        ]
        yield (
            f"types: {types['entities']:,} entities have {types['types']:,} types by "
            f"{types['source']}{''.join(odd)}; so relations have no types of their ends"
        )
    if types and "triples" in types:
        yield f"types: {types['triples']:,} triples of {types['source']} were taken out"


def _splits(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield how triples were split, what is repeated, and what is not in train."""
    split = report["split"] or {}
    if until := split.get("until"):
        ends = ", ".join(f"{name} until {time}" for name, time in until.items())
        yield f"split by time: {ends}"
    elif split.get("by") == "head":
        yield "split by head: at random within the triples of each head"
    elif split.get("by") == "last":
        yield (
            f"split by last (count {split['count']:,}): the last triples of each head by time are "
            "test, those before them valid"
        )
    for split, entities in report["unseen_entities"].items():
        yield (
            f"{split}: {entities['entities']:,} entities never occur in train, such as "
            f"{entities['examples'][0]!r}; their {entities['triples']:,} triples stay in"
        )
    for split, count in report["duplicates"].items():
        counts = report["triples"]
        total = count + (sum(counts.values()) if split == WHOLE else counts[split])
        if count:
            yield f"{split}: {count:,} duplicate triples were dropped" + (
                f" of {total:,}; to train with how often each occurs, count them into a column of "
                "weights and set data.weights loss"
            ) * (count >= MANY * total)
    for splits, count in report["shared"].items():
        if count:
            first, second = splits.split("-")
            yield (
                f"{splits}: {count:,} triples occur in both; those of {second} are ranked all the "
                f"same, which flatters the results: take them out of {first} or {second}"
            )
    for split, relations in report["unseen_relations"].items():
        yield f"{split}: relations without a training triple: {', '.join(relations)}"


LARGEST = 2_000_000  # training triples that `leak_notes` looks at, in a few seconds


def leak_notes(store: TripleStore) -> list[str]:
    """Return a sentence on how many triples of valid and test follow from train, if any do."""
    if not len(store.valid) + len(store.test):
        return []
    if len(store.train) > LARGEST:
        return [
            f"with more than {LARGEST:,} training triples nobody has looked for valid and test "
            "triples that follow from train; `kge-torchrec data check` does"
        ]
    leaks = {split: count for split, count in find_leaks(store)[1].items() if count}
    said = leaking(leaks, store.report["triples"])
    return [f"{said}; `kge-torchrec data check` names these relations"] if leaks else []


def leaking(leaks: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """Return a sentence on the number of triples of each split that leak, of all its triples."""
    shares = [
        f"{count:,} of {sizes[split]:,} {split} triples ({count / sizes[split]:.1%})"
        for split, count in leaks.items()
    ]
    return (
        f"{' and '.join(shares)} follow from train by a relation that is symmetric, or an inverse "
        "or duplicate of another"
    )
