"""Cores of a graph, on which poor trials are dropped early.

The method follows GraSH (Kochsiek, Niesel and Gemulla 2022, Start Small, Think Big). A k-core is
the largest part of a graph in which every entity is in at least k triples, so it is dense enough
to tell models apart. A core has its own entities, relations and valid triples, and no test
triples.

Shapes: N entities, R relations, T triples.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from kge_torchrec.data.sort import CHUNK
from kge_torchrec.data.split import divide
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.contents import triples_inside, types_and_features
from kge_torchrec.data.store.filter_index import build_indices
from kge_torchrec.data.store.writing import StoreContents, new_store, write_store
from kge_torchrec.kernels.jit import kernel

FEWEST_VALID = 500  # valid triples of a core; if it has fewer, training triples are held out
MOST_HELD_OUT = 0.1  # the largest share of a core's training triples to hold out


def core_numbers(store: TripleStore) -> np.ndarray:
    """Return the core number of each entity: (N,) int64.

    It is the largest k for which the entity is in the k-core of train.
    """
    heads, tails = (store.side_index("train", side) for side in ("tail", "head"))
    return _core_numbers(heads.indptr, heads.entities, tails.indptr, tails.entities)


@kernel
def _core_numbers(
    head_ptr: np.ndarray, tails: np.ndarray, tail_ptr: np.ndarray, heads: np.ndarray
) -> np.ndarray:
    """Compute core numbers by removing entities by degree (Batagelj and Zaversnik 2003)."""
    size = len(head_ptr) - 1
    degree = np.empty(size, np.int64)
    for entity in range(size):
        degree[entity] = (
            head_ptr[entity + 1] - head_ptr[entity] + tail_ptr[entity + 1] - tail_ptr[entity]
        )
    starts = np.zeros(degree.max() + 2, np.int64)  # where each degree starts in ``order``
    for entity in range(size):
        starts[degree[entity] + 1] += 1
    starts = np.cumsum(starts)
    place, order, free = np.empty(size, np.int64), np.empty(size, np.int64), starts.copy()
    for entity in range(size):
        place[entity] = free[degree[entity]]
        order[place[entity]] = entity
        free[degree[entity]] += 1
    for turn in range(size):
        entity = order[turn]
        for part in range(2):
            ptr, neighbors = (head_ptr, tails) if part == 0 else (tail_ptr, heads)
            for row in range(ptr[entity], ptr[entity + 1]):
                other = neighbors[row]
                if degree[other] > degree[entity]:
                    # Move it to the front of its degree, then start that degree one later.
                    first = starts[degree[other]]
                    swapped = order[first]
                    order[first], order[place[other]] = other, swapped
                    place[swapped], place[other] = place[other], first
                    starts[degree[other]] += 1
                    degree[other] -= 1
    return degree


def core_of_share(store: TripleStore, cores: np.ndarray, share: float) -> tuple[int, float]:
    """Return the k whose k-core has the share of training triples nearest to ``share``.

    Shares are compared on a log scale.

    Returns:
        k and the share of its core. If the core is the whole graph, as in a graph whose entities
        are all alike, k is 0 and the share 1.
    """
    triples = np.zeros(int(cores.max()) + 1, np.int64)
    for start in range(0, len(store.train), CHUNK):
        part = store.train[start : start + CHUNK]
        lower = np.minimum(cores[part[:, 0]], cores[part[:, 2]])
        triples += np.bincount(lower, minlength=len(triples))
    inside = np.cumsum(triples[::-1])[::-1]  # triples of each k-core
    shares = inside / inside[0]
    nearest = int(np.abs(np.log(shares) - np.log(share)).argmin())
    whole = shares[nearest] == 1
    return (0, 1.0) if whole else (nearest, float(shares[nearest]))


def write_core(store: TripleStore, cores: np.ndarray, k: int, path: Path, seed: int) -> TripleStore:
    """Write the k-core as a store at ``path``, and replace a store that is there.

    The core keeps the valid triples that lie in it. If there are fewer than 500, some of its
    training triples are held out as well; all entities and relations remain in train.

    Args:
        store: The store of the graph.
        cores: (N,) int64, the core number of each entity.
        k: The smallest core number to keep.
        path: The folder of the new store.
        seed: The seed for held-out triples.
    """
    inside = cores >= k
    triples, weights = triples_inside(store, inside, ("train", "valid"))
    train, valid = triples["train"], triples["valid"]
    relations = np.unique(train[:, 1])
    number = np.full(store.num_relations, -1, train.dtype)
    number[relations] = np.arange(len(relations))
    inside_relation = number[valid[:, 1]] >= 0
    valid = valid[inside_relation]
    if "valid" in weights:
        weights["valid"] = weights["valid"][inside_relation]
    for part in (train, valid):
        part[:, 1] = number[part[:, 1]]
    entities = np.flatnonzero(inside)
    sizes = len(entities), len(relations)
    missing = min(FEWEST_VALID - len(valid), int(MOST_HELD_OUT * len(train)))
    if missing > 0:
        share = missing / len(train)
        held_out = divide(train, (1 - share, share, 0.0), seed, *sizes) == 1
        train, valid = train[~held_out], np.concatenate([valid, train[held_out]])
        if "train" in weights:
            weights = {"train": weights["train"][~held_out]}  # valid weights are not needed
    triples = {"train": train, "valid": valid, "test": np.empty((0, 3), train.dtype)}
    report = {
        "triples": {split: len(part) for split, part in triples.items()},
        "core": {"k": k, "of": store.fingerprint},
    }
    labels = (
        store.entities.array.take(pa.array(entities)),
        store.relations.array.take(pa.array(relations)),
    )
    with new_store(path, overwrite=True) as directory:
        types, features, notes = types_and_features(store, inside, triples)
        indices = build_indices(triples, *sizes)
        parts = StoreContents(*labels, triples, indices, weights, types, features=features)
        write_store(directory, parts, report | notes)
    return TripleStore.open(path)
