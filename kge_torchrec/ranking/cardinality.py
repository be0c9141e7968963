"""Cardinalities of relations: how many entities a relation links to an entity on each side.

Shapes: R relations.
"""

from __future__ import annotations

import numpy as np

from kge_torchrec.data.sort import CHUNK
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import seen_pairs

THRESHOLD = 1.5  # mean entities from which a side is "N" (Bordes et al. 2013)
CATEGORIES = ("1-1", "1-N", "N-1", "N-N")
UNSEEN = len(CATEGORIES)  # the category of a relation without a training triple


def cardinalities(store: TripleStore) -> dict[str, np.ndarray]:
    """Count the training triples of each relation, and the entities that it links on average.

    Returns:
        "triples" (R,) int64; the means "heads_per_tail" and "tails_per_head" (R,) float64, NaN for
        relations without a training triple.
    """
    relations = store.num_relations
    pairs, triples = {}, np.zeros(relations, np.int64)
    for side in ("tail", "head"):
        pairs[side] = np.zeros(relations, np.int64)
        for _, seen in seen_pairs(store.side_index("train", side)):
            pairs[side] += np.bincount(seen, minlength=relations)
    for start in range(0, len(store.train), CHUNK):
        column = np.asarray(store.train[start : start + CHUNK, 1])
        triples += np.bincount(column, minlength=relations)
    with np.errstate(invalid="ignore"):  # 0 / 0 of unseen relations
        return {
            "triples": triples,
            "tails_per_head": triples / pairs["tail"],
            "heads_per_tail": triples / pairs["head"],
        }


def categories(found: dict[str, np.ndarray]) -> np.ndarray:
    """Return the index in ``CATEGORIES`` of each relation, or ``UNSEEN``: (R,) int8.

    A relation is 1-N if it links a head to at least 1.5 tails on average, but a tail to fewer
    heads (Bordes et al. 2013, Translating Embeddings).

    Args:
        found: The result of ``cardinalities``.
    """
    many_tails = found["tails_per_head"] >= THRESHOLD
    many_heads = found["heads_per_tail"] >= THRESHOLD
    place = (2 * many_heads + many_tails).astype(np.int8)
    place[found["triples"] == 0] = UNSEEN
    return place
