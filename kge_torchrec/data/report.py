"""Report on the data of a store: counts for `prepare`, notes for people, and triples that leak.

Two relations are duplicates if they mostly link the same (head, tail).  They are inverses if one
mostly links the reversed pairs of the other.  A relation is symmetric if it is its own inverse
(Toutanova and Chen 2015; Akrami et al. 2020, with their threshold of 0.8 of the triples of
either).  A test triple leaks if such a relation links its entities in train: no learning is needed
to answer it.

Triples are sorted by their unordered pair of entities; relation r has the code 2r in the direction
of the pair, otherwise 2r + 1.  So relations that share a pair are adjacent, and rows i and i + d
are compared for d = 1, 2, ..., for all pairs at once.  A loop (an entity linked to itself) has one
direction, so it only counts for duplicates.

Shapes: T triples, R relations, M rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kge_torchrec.data import SPLITS
from kge_torchrec.data.sort import chunks, id_counts, pack, sorted_rows, value_counts
from kge_torchrec.data.store import TripleStore

FEW = 100  # fewer triples say little about a model


def notes(store: TripleStore) -> list[str]:
    """Return what a person should know about the data before reading results, in sentences."""
    return [*reading_notes(store), *_splits(store.report)]


def reading_notes(store: TripleStore) -> list[str]:
    """Return the notes about files and sizes, without those about splits."""
    report = store.report
    return [
        *_reading(report.get("reading") or ()),
        *_sizes(store),
        *_features(report),
        *_columns(report),
    ]


def _reading(notes: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield how files were read, in one sentence for files that are alike."""
    places: dict[str, list[str]] = {}
    for place, said in notes:
        places.setdefault(said, []).append(place)
    for said, alike in places.items():
        more = f" ({len(alike) - 1:,} more files alike)" if len(alike) > 1 else ""
        yield f"{alike[0]}{more}: {said}"


def _sizes(store: TripleStore) -> Iterator[str]:
    """Yield what is too small to train on or to judge by."""
    counts = {split: len(store.split(split)) for split in SPLITS}
    split = store.report["split"]
    if store.num_entities == 1:
        yield "there is 1 entity: every rank is 1, and nothing can be learned"
    shares = [True, *(split or {}).get("ratio", (1, 1, 1))[1:]]
    missing = [s for s, share in zip(SPLITS, shares, strict=True) if share and not counts[s]]
    if missing:
        effect = "nothing is ranked" if "test" in missing else "the last checkpoint is the best"
        why = "name files so, or give one file, which is divided"
        if split:
            why = _KEPT[split.get("by", "random")] + "; give more"
        yield f"{' and '.join(missing)}: no triples, so that {effect}; {why}"
    few = [f"{name} has {count:,}" for name, count in counts.items() if 0 < count < FEW]
    if few:
        yield f"too few triples for figures to mean much: {', '.join(few)}"


# Why a split may have no triples, by the way to split.
_KEPT = {
    "random": "train needs all triples, to have every entity and relation",
    "head": "each head keeps a triple in train",
    "time": "a share is below one triple, or many triples have one time",
    "last": "each head keeps a triple in train",
}


def _features(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many entities have features and no triple; a wrong label would be among them."""
    features = report.get("features") or {}
    if count := features.get("without_triples"):
        yield (
            f"{features['source']}: {count:,} of its entities are in no triple, such as "
            f"{features['example']!r}; they become entities that their features alone describe"
        )


def _columns(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what became of literals, weights and types."""
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
    elif types:
        yield (
            f"types: {types['triples']:,} triples of {types['relation']} say {types['types']:,} "
            f"types of {types['entities']:,} entities, and "
            + ("stay in" if types["use"] == "keep" else "were taken out")
        )


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
        if count:
            yield f"{split}: {count:,} duplicate triples were dropped"
    for splits, count in report["shared"].items():
        if count:
            first, second = splits.split("-")
            yield (
                f"{splits}: {count:,} triples occur in both; those of {second} are ranked all the "
                f"same, which flatters the results: take them out of {first} or {second}"
            )
    for split, relations in report["unseen_relations"].items():
        yield f"{split}: relations without a training triple: {', '.join(relations)}"


THRESHOLD = 0.8
LARGEST = 2_000_000  # training triples that `leak_notes` looks at, in a second or two


def _coded(triples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the smaller and the larger entity of each triple, and its relation as a code."""
    heads, relations, tails = triples.T
    code = relations.astype(np.int32)
    code *= 2
    code += heads > tails
    return np.minimum(heads, tails), np.maximum(heads, tails), code


class PairIndex:
    """Triples by their unordered pairs of entities.

    Attributes:
        pairs: (T,) uint64, ascending.
        codes: (T,) int32, relations with their direction.
    """

    def __init__(self, triples: np.ndarray, num_entities: int, num_relations: int):
        self._sizes = (num_entities, num_entities)
        low, high, codes = sorted_rows(_coded(triples), (*self._sizes, 2 * num_relations))
        self.pairs, self.codes = self._keys(low, high), codes

    def _keys(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        keys = pack((low, high), self._sizes)
        assert keys is not None  # two ids of at most 32 bits
        return keys

    def together(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the codes (M,) and (M,) of all rows of one pair, two by two, each two once."""
        rows = np.flatnonzero(self.pairs[1:] == self.pairs[:-1])
        distance = 1
        while len(rows):
            yield self.codes[rows], self.codes[rows + distance]
            distance += 1
            rows = rows[rows + distance < len(self.pairs)]
            rows = rows[self.pairs[rows] == self.pairs[rows + distance]]

    def beside(self, triples: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield rows of other triples (M,), their codes, and the codes of the same pairs here."""
        low, high, codes = _coded(triples)
        keys = self._keys(low, high)
        starts = np.searchsorted(self.pairs, keys, "left")
        counts = np.searchsorted(self.pairs, keys, "right") - starts
        rows, distance = np.flatnonzero(counts), 0
        while len(rows):
            yield rows, codes[rows], self.codes[starts[rows] + distance]
            distance += 1
            rows = rows[counts[rows] > distance]


@dataclass(frozen=True)
class Overlap:
    """Two relations and the share of the triples of each that the other has too."""

    first: int
    second: int
    common: int  # triples of the first whose pair the second has
    share_of_first: float
    share_of_second: float


@dataclass(frozen=True)
class Overlaps:
    """Relations that overlap; lists are ordered by the number of common triples."""

    duplicates: list[Overlap]
    inverses: list[Overlap]
    symmetric: list[Overlap]  # first is second
    redundant: np.ndarray  # ascending: code * 2R + code of each pair of overlapping relations
    base: int  # 2R


def find_overlaps(
    index: PairIndex, sizes: np.ndarray, loops: np.ndarray, threshold: float = THRESHOLD
) -> Overlaps:
    """Return the relations that have at least ``threshold`` of each other's pairs in train.

    Args:
        index: The training triples.
        sizes: (R,) int64, triples of each relation.
        loops: (R,) int64, how many of them are loops, which do not count for symmetry.
        threshold: Smallest share of common pairs.
    """
    base = 2 * len(sizes)
    keys, counts = value_counts(
        np.minimum(one, other).astype(np.int64) * base + np.maximum(one, other)
        for one, other in index.together()
    )
    first, second = np.divmod(keys, base)
    inverse = (first ^ second) & 1 == 1
    # Both ways of reading a pair say the same of two relations: (2r, 2s) and (2r + 1, 2s + 1).
    relations = np.stack([first // 2, second // 2])
    merged = (np.min(relations, 0) * len(sizes) + np.max(relations, 0)) * 2 + inverse
    kinds, slot = np.unique(merged, return_inverse=True)
    common = np.bincount(slot, counts, minlength=len(kinds)).astype(np.int64)
    first, second = np.divmod(kinds // 2, len(sizes))
    common = np.where(first == second, 2 * common, common)  # of a symmetric pair both triples
    counted = sizes[first] - np.where(first == second, loops[first], 0)
    shares = common / counted, common / np.where(first == second, counted, sizes[second])
    kept = np.flatnonzero(np.minimum(*shares) >= threshold)
    kept = kept[np.argsort(-common[kept], kind="stable")]
    lists: dict[str, list[Overlap]] = {"duplicates": [], "inverses": [], "symmetric": []}
    for i in kept.tolist():
        a, b = int(first[i]), int(second[i])
        kind = "symmetric" if a == b else "inverses" if kinds[i] % 2 else "duplicates"
        lists[kind].append(Overlap(a, b, int(common[i]), float(shares[0][i]), float(shares[1][i])))
    codes = [
        code
        for kind, overlaps in lists.items()
        for overlap in overlaps
        for code in _codes(overlap, base, turned=kind != "duplicates")
    ]
    return Overlaps(**lists, redundant=np.unique(np.array(codes, np.int64)), base=base)


def _codes(overlap: Overlap, base: int, turned: bool) -> Iterator[int]:
    """Yield the pairs of codes, as one number, of a held-out and a training triple that overlap."""
    for one, other in ((overlap.first, overlap.second), (overlap.second, overlap.first)):
        for direction in (0, 1):
            yield (2 * one + direction) * base + 2 * other + (direction ^ turned)


def leaking(index: PairIndex, overlaps: Overlaps, triples: np.ndarray) -> dict[str, np.ndarray]:
    """Return which of the held-out triples (T, 3) leak from train: (T,) bool for each kind.

    "redundant": a duplicate or inverse of their relation, or itself if it is symmetric, links their
    entities in train; "linked" and "linked_reversed": any relation does, in their direction or in
    the other one (Toutanova and Chen 2015 took both out of FB15k for valid and test).
    """
    leaks = {
        name: np.zeros(len(triples), bool) for name in ("redundant", "linked", "linked_reversed")
    }
    for rows, own, here in index.beside(triples):
        turned = (own ^ here) & 1 == 1
        leaks["linked"][rows[~turned]] = True
        leaks["linked_reversed"][rows[turned]] = True
        if len(overlaps.redundant):
            key = own.astype(np.int64) * overlaps.base + here
            leaks["redundant"][rows[np.isin(key, overlaps.redundant)]] = True
    return leaks


def loops_of(train: np.ndarray, num_relations: int) -> np.ndarray:
    """Return how many triples of each relation in ``train`` (T, 3) are loops: (R,) int64."""
    loops = np.zeros(num_relations, np.int64)
    for head, relation, tail in (rows.T for rows in chunks(train)):
        loops += np.bincount(relation[head == tail], minlength=num_relations)
    return loops


def leak_notes(store: TripleStore) -> list[str]:
    """Return a sentence on how many triples of valid and test follow from train, if any do."""
    held_out = {split: store.split(split) for split in ("valid", "test") if len(store.split(split))}
    if not held_out:
        return []
    if len(store.train) > LARGEST:
        return [
            f"with more than {LARGEST:,} training triples nobody has looked for valid and test "
            "triples that follow from train; `kge-torchrec data check` does"
        ]
    index = PairIndex(store.train, store.num_entities, store.num_relations)
    sizes = id_counts(store.train[:, 1], store.num_relations)
    overlaps = find_overlaps(index, sizes, loops_of(store.train, store.num_relations))
    shares = []
    for split, triples in held_out.items():
        count = int(leaking(index, overlaps, triples)["redundant"].sum())
        if count:
            share = count / len(triples)
            shares.append(f"{count:,} of {len(triples):,} {split} triples ({share:.1%})")
    if not shares:
        return []
    return [
        f"{' and '.join(shares)} follow from train by a relation that is symmetric, or an inverse "
        "or duplicate of another; `kge-torchrec data check` names these relations"
    ]
