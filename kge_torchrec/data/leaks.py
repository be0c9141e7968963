"""Held-out triples that follow from train by relations which overlap.

Two relations are duplicates if they mostly link the same (head, tail).  They are inverses if one
mostly links the reversed pairs of the other.  A relation is symmetric if it is its own inverse
(Toutanova and Chen 2015; Akrami et al. 2020, with their threshold of 0.8 of the triples of
either).  A test triple leaks if such a relation links its entities in train: no learning is needed
to answer it.

Triples are joined by their unordered pair of entities.  Relation r has the code 2r in the direction
of the pair, otherwise 2r + 1.  A loop (an entity linked to itself) has one direction, so it only
counts for duplicates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from kge_torchrec.data import HEAD, RELATION, SPLITS, TAIL
from kge_torchrec.data.sort import id_counts
from kge_torchrec.data.store import TripleStore

THRESHOLD = 0.8


def find_leaks(store: TripleStore) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the overlaps of relations in train, largest first, and how many triples leak by split.

    An overlap has a ``kind`` (duplicates, inverses, symmetric), the relations ``first`` and
    ``second``, their number of ``common`` triples, and the share of the triples of each, which is
    at least ``THRESHOLD``.  Splits without triples are left out.
    """
    count, train = store.num_relations, store.train

    def overlaps_of(codes: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return a number for two relations, and whether one has the reversed pairs."""
        relations = np.sort([codes // 2, others // 2], 0)
        return (relations[0] * count + relations[1]) * 2 + ((codes ^ others) & 1)

    table = _by_pair(train)
    both = table.join(table.rename_columns(["pair", "other"]), "pair", join_type="inner")
    counts = both.group_by(["code", "other"]).aggregate([([], "count_all")])
    codes, others, times = (counts[name].to_numpy() for name in ("code", "other", "count_all"))
    once = codes // 2 <= others // 2
    numbers, slot = np.unique(overlaps_of(codes[once], others[once]), return_inverse=True)
    common = np.bincount(slot, times[once], minlength=len(numbers)).astype(np.int64)
    (first, second), is_turned = np.divmod(numbers // 2, count), numbers % 2 == 1
    is_loop = train[:, HEAD] == train[:, TAIL]
    sizes = id_counts(train[:, RELATION], count)
    straight = sizes - np.bincount(train[is_loop, RELATION], minlength=count)
    is_same = first == second
    totals = np.where(is_same, straight[first], [sizes[first], sizes[second]])
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = common / totals
    kept = np.flatnonzero((shares.min(0) >= THRESHOLD) & (is_turned | ~is_same))
    labels = store.relations
    overlaps = [
        {
            "kind": "symmetric" if is_same[i] else "inverses" if is_turned[i] else "duplicates",
            "first": labels[int(first[i])],
            "second": labels[int(second[i])],
            "common": int(common[i]),
            "share of first": float(shares[0, i]),
            "share of second": float(shares[1, i]),
        }
        for i in kept[np.argsort(-common[kept], kind="stable")].tolist()
    ]
    leaks = {}
    for split in SPLITS[1:]:
        triples = store.split(split)
        if len(triples):
            rows = pa.array(np.arange(len(triples)))
            held_out = _by_pair(triples).rename_columns(["pair", "own"]).append_column("row", rows)
            both = held_out.join(table, "pair", join_type="inner")
            found = overlaps_of(both["own"].to_numpy(), both["code"].to_numpy())
            leaks[split] = len(np.unique(both["row"].to_numpy()[np.isin(found, numbers[kept])]))
    return overlaps, leaks


def _by_pair(triples: np.ndarray) -> pa.Table:
    """Return the unordered pair of each triple as one number, and its relation as a code."""
    heads, relations, tails = triples.T.astype(np.int64)
    pair = np.minimum(heads, tails) << 32 | np.maximum(heads, tails)
    return pa.table({"pair": pair, "code": 2 * relations + (heads > tails)})
