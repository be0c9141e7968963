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

from typing import Any

import numpy as np
import pyarrow as pa

from kge_torchrec.data import HEAD, RELATION, SPLITS, TAIL
from kge_torchrec.data.sort import id_counts
from kge_torchrec.data.store import TripleStore

THRESHOLD = 0.8
KINDS = ("duplicates", "inverses", "symmetric")


def find_leaks(
    store: TripleStore, threshold: float = THRESHOLD
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, int]]]:
    """Return the overlaps of relations in train, and the number of leaks of valid and test.

    An overlap is of relations ``first`` and ``second`` that have at least ``threshold`` of each
    other's pairs; ``common`` is the number of triples of the first whose pair the second has.  The
    lists of each kind are ordered by it.  Loops don't count for symmetry.

    Splits without triples are left out.  The kinds of leaks are "redundant" (a duplicate or inverse
    of the triple's relation, or itself if it is symmetric, links its entities in train), "linked"
    and "linked_reversed" (any relation does, in its direction or in the other one; Toutanova and
    Chen 2015 took both out of FB15k for valid and test).
    """
    num_relations, train = store.num_relations, store.train
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
    pairs, slot = np.unique((low * num_relations + high) * 2 + turned, return_inverse=True)
    common = np.bincount(slot, count[once], minlength=len(pairs)).astype(np.int64)
    first, second = np.divmod(pairs // 2, num_relations)
    same = first == second
    common = np.where(same, 2 * common, common)  # of a symmetric pair both triples
    of = [np.where(same, sizes[r] - loops[r], sizes[r]) for r in (first, second)]
    shares = common / of[0], common / of[1]
    kept = np.flatnonzero(np.minimum(*shares) >= threshold)
    overlaps: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    known = []  # two codes of which the second tells the first
    for i in kept[np.argsort(-common[kept], kind="stable")].tolist():
        kind = "symmetric" if same[i] else "inverses" if pairs[i] % 2 else "duplicates"
        own = int(first[i]), int(second[i])
        overlaps[kind].append(
            {
                "first": store.relations[own[0]],
                "second": store.relations[own[1]],
                "common": int(common[i]),
                "share_of_first": float(shares[0][i]),
                "share_of_second": float(shares[1][i]),
            }
        )
        for one, two in (own, own[::-1]):
            for turn in (0, 1):
                known.append((2 * one + turn) << 32 | 2 * two + (turn ^ (kind != "duplicates")))
    leaks = {}
    for split in SPLITS[1:]:
        triples = store.split(split)
        if len(triples):
            rows = pa.array(np.arange(len(triples)))
            held_out = _by_pair(triples).rename_columns(["pair", "own"]).append_column("row", rows)
            both = held_out.join(table, "pair", join_type="inner")
            row, own_code, code = (both[name].to_numpy() for name in ("row", "own", "code"))
            is_turned = (own_code ^ code) & 1 == 1
            is_redundant = np.isin(own_code << 32 | code, np.array(known, np.int64))
            kinds = {"redundant": is_redundant, "linked": ~is_turned, "linked_reversed": is_turned}
            leaks[split] = {kind: len(np.unique(row[is_one])) for kind, is_one in kinds.items()}
    return overlaps, leaks


def _by_pair(triples: np.ndarray) -> pa.Table:
    """Return the unordered pair of each triple as one number, and its relation as a code."""
    heads, relations, tails = triples.T.astype(np.int64)
    pair = np.minimum(heads, tails) << 32 | np.maximum(heads, tails)
    return pa.table({"pair": pair, "code": 2 * relations + (heads > tails)})
