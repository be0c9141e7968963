"""What relations are like in train: with which entities on either side, and with how many at once.

In the filter index the triples of one (anchor, relation) stand together, so the distinct pairs of
entity and relation are the places where such a run starts.  They are read a chunk at a time.

Shapes: N entities, R relations, T triples, M pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kge_torchrec.data.store.filter_index import SideIndex
from kge_torchrec.data.sort import CHUNK
from kge_torchrec.data.store import TripleStore

THRESHOLD = 1.5  # of Bordes et al. 2013: entities on a side, on average, from which it is "N"
CATEGORIES = ("1-1", "1-N", "N-1", "N-N")
UNSEEN = len(CATEGORIES)  # the category of a relation without a training triple
OTHER = {"head": "tail", "tail": "head"}


def seen_pairs(
    index: SideIndex, first: int = 0, stop: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The distinct (entity, relation) of which ``index`` has answers, ordered by both.

    index: of side "tail" for the heads that a relation has been seen with, "head" for its tails.
    first, stop: entities to look at; stop None means all.

    Yields entities (M,) and relations (M,), int64, of a chunk of triples at a time.
    """
    stop = len(index.indptr) - 1 if stop is None else stop
    row, last = int(index.indptr[first]), int(index.indptr[stop])
    entity, before = first, (-1, -1)
    while row < last:
        end = min(row + CHUNK, last)
        # Of the entities up to the chunk's last row; the last of them may go on in the next one.
        ending = int(np.searchsorted(index.indptr, end, "left"))
        bounds = np.clip(index.indptr[entity : ending + 1], row, end)
        entities = np.repeat(np.arange(entity, ending), np.diff(bounds))
        relations = np.asarray(index.relations[row:end], np.int64)
        new = np.ones(len(relations), bool)
        new[1:] = (relations[1:] != relations[:-1]) | (entities[1:] != entities[:-1])
        new[0] = before != (int(entities[0]), int(relations[0]))
        before = (int(entities[-1]), int(relations[-1]))
        yield entities[new], relations[new]
        row, entity = end, int(entities[-1])


def cardinalities(store: TripleStore) -> dict[str, np.ndarray]:
    """How many triples a relation has, and how many entities it links on average, in train.

    Returns "triples" (R,) int64; "heads_per_tail" and "tails_per_head" (R,) float64, NaN for
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
    """(R,) int8: the place in ``CATEGORIES`` of each relation, or ``UNSEEN``.

    found: what ``cardinalities`` gave.  A relation is 1-N if it links a head to at least 1.5 tails
    on average but a tail to fewer heads (Bordes et al. 2013, Translating Embeddings).
    """
    many_tails = found["tails_per_head"] >= THRESHOLD
    many_heads = found["heads_per_tail"] >= THRESHOLD
    place = (2 * many_heads + many_tails).astype(np.int8)
    place[found["triples"] == 0] = UNSEEN
    return place
