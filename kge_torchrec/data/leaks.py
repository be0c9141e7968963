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

from kge_torchrec.data.sort import chunks

THRESHOLD = 0.8
KINDS = ("duplicates", "inverses", "symmetric")


class Overlap(NamedTuple):
    """Two relations, and the share of the triples of each that the other has too."""

    first: int
    second: int
    common: int  # triples of the first whose pair the second has
    share_of_first: float
    share_of_second: float


def loops_of(train: np.ndarray, num_relations: int) -> np.ndarray:
    """Return how many triples of each relation in ``train`` (T, 3) are loops: (R,) int64."""
    loops = np.zeros(num_relations, np.int64)
    for head, relation, tail in (rows.T for rows in chunks(train)):
        loops += np.bincount(relation[head == tail], minlength=num_relations)
    return loops


def find_overlaps(
    train: np.ndarray, sizes: np.ndarray, loops: np.ndarray, threshold: float = THRESHOLD
) -> dict[str, list[Overlap]]:
    """Return the relations that have at least ``threshold`` of each other's pairs, by kind.

    The lists are ordered by the number of common triples.

    Args:
        train: (T, 3).
        sizes: (R,) int64, triples of each relation.
        loops: (R,) int64, how many of them are loops, which do not count for symmetry.
        threshold: Smallest share of common pairs.
    """
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


def leaking(
    train: np.ndarray, overlaps: dict[str, list[Overlap]], triples: np.ndarray
) -> dict[str, np.ndarray]:
    """Return which of the held-out triples (T, 3) leak from train: (T,) bool for each kind.

    "redundant": a duplicate or inverse of their relation, or itself if it is symmetric, links their
    entities in train; "linked" and "linked_reversed": any relation does, in their direction or in
    the other one (Toutanova and Chen 2015 took both out of FB15k for valid and test).
    """
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
    leaks = {}
    for name, marked in (
        ("redundant", is_redundant),
        ("linked", ~is_turned),
        ("linked_reversed", is_turned),
    ):
        leaks[name] = np.zeros(len(triples), bool)
        leaks[name][row[marked]] = True
    return leaks


def _by_pair(triples: np.ndarray) -> pa.Table:
    """Return the unordered pair of each triple as one number, and its relation as a code."""
    heads, relations, tails = triples.T.astype(np.int64)
    pair = np.minimum(heads, tails) << 32 | np.maximum(heads, tails)
    return pa.table({"pair": pair, "code": 2 * relations + (heads > tails)})
