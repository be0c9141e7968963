"""Held-out triples that follow from train by relations which overlap.

Two relations are duplicates if they mostly link the same (head, tail).  They are inverses if one
mostly links the reversed pairs of the other.  A relation is symmetric if it is its own inverse
(Toutanova and Chen 2015; Akrami et al. 2020, with their threshold of 0.8 of the triples of
either).  A test triple leaks if such a relation links its entities in train: no learning is needed
to answer it.

Triples are joined by their unordered pair of entities.  Relation r has the code 2r in the direction
of the pair, otherwise 2r + 1.  A loop (an entity linked to itself) has one direction, so it only
counts for duplicates.

Shapes: T triples, R relations, M pairs of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kge_torchrec.data import HEAD, RELATION, SPLITS, TAIL
from kge_torchrec.data.sort import id_counts
from kge_torchrec.data.store import TripleStore

THRESHOLD = 0.8
KINDS = ("duplicates", "inverses", "symmetric")


class Overlap(NamedTuple):
    """Two relations, and the share of the triples of each that the other has too."""

    first: int
    second: int
    common: int  # triples of the first whose pair the second has
    share_of_first: float
    share_of_second: float


def find_leaks(
    store: TripleStore, threshold: float = THRESHOLD
) -> tuple[dict[str, list[Overlap]], dict[str, dict[str, int]]]:
    """Return the overlaps of relations in train, and the number of leaks of valid and test.

    Splits without triples are left out.  The kinds of leaks are "redundant" (a duplicate or inverse
    of the triple's relation, or itself if it is symmetric, links its entities in train), "linked"
    and "linked_reversed" (any relation does, in its direction or in the other one; Toutanova and
    Chen 2015 took both out of FB15k for valid and test).
    """
    overlaps = find_overlaps(store.train, store.num_relations, threshold)
    held_out = {split: store.split(split) for split in SPLITS[1:]}
    return overlaps, {
        split: _count_leaks(store.train, overlaps, triples)
        for split, triples in held_out.items()
        if len(triples)
    }


def find_overlaps(
    train: np.ndarray, num_relations: int, threshold: float
) -> dict[str, list[Overlap]]:
    """Return the relations that have at least ``threshold`` of each other's pairs, by kind.

    The lists are ordered by the number of common triples.  Loops don't count for symmetry.
    """
    sizes = id_counts(train[:, RELATION], num_relations)
    is_loop = train[:, HEAD] == train[:, TAIL]
    loops = np.bincount(train[is_loop, RELATION], minlength=num_relations)
    table = _by_pair(train)
    both = table.join(table.rename_columns(["pair", "other"]), "pair", join_type="inner")
    counts = both.group_by(["code", "other"]).aggregate([([], "count_all")])
    code, other, count = (counts[name].to_numpy() for name in ("code", "other", "count_all"))
    once = code < other
    low, high = np.sort([code[once] // 2, other[once] // 2], 0).astype(np.int64)
    turned = (code[once] ^ other[once]) & 1
    # Both ways of reading a pair say the same of two relations: (2r, 2s) and (2r + 1, 2s + 1).
    kinds, slot = np.unique((low * len(sizes) + high) * 2 + turned, return_inverse=True)
    common = np.bincount(slot, count[once], minlength=len(kinds)).astype(np.int64)
    first, second = np.divmod(kinds // 2, len(sizes))
    same = first == second
    common = np.where(same, 2 * common, common)  # of a symmetric pair both triples
    of = [np.where(same, sizes[r] - loops[r], sizes[r]) for r in (first, second)]
    shares = common / of[0], common / of[1]
    kept = np.flatnonzero(np.minimum(*shares) >= threshold)
    overlaps: dict[str, list[Overlap]] = {kind: [] for kind in KINDS}
    for i in kept[np.argsort(-common[kept], kind="stable")].tolist():
        kind = "symmetric" if same[i] else "inverses" if kinds[i] % 2 else "duplicates"
        own = int(first[i]), int(second[i]), int(common[i])
        overlaps[kind].append(Overlap(*own, float(shares[0][i]), float(shares[1][i])))
    return overlaps


def _count_leaks(
    train: np.ndarray, overlaps: dict[str, list[Overlap]], triples: np.ndarray
) -> dict[str, int]:
    rows = pa.array(np.arange(len(triples)))
    held_out = _by_pair(triples).rename_columns(["pair", "own"]).append_column("row", rows)
    both = held_out.join(_by_pair(train), "pair", join_type="inner")
    row, own, code = (both[name].to_numpy() for name in ("row", "own", "code"))
    is_turned = (own ^ code) & 1 == 1
    known = [
        (2 * one + direction, 2 * other + (direction ^ (kind != "duplicates")))
        for kind, found in overlaps.items()
        for overlap in found
        for one, other in (overlap[:2], overlap[1::-1])
        for direction in (0, 1)
    ]
    keys = np.array(known, np.int64).reshape(-1, 2)
    is_redundant = np.isin(own << 32 | code, keys[:, 0] << 32 | keys[:, 1])
    kinds = {"redundant": is_redundant, "linked": ~is_turned, "linked_reversed": is_turned}
    return {kind: len(np.unique(row[marked])) for kind, marked in kinds.items()}


def _by_pair(triples: np.ndarray) -> pa.Table:
    """Return the unordered pair of each triple as one number, and its relation as a code."""
    heads, relations, tails = triples.T.astype(np.int64)
    pair = np.minimum(heads, tails) << 32 | np.maximum(heads, tails)
    return pa.table({"pair": pair, "code": 2 * relations + (heads > tails)})
