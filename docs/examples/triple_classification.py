"""Say of triples whether they are true, by a threshold on the score for each relation.

    kge-torchrec export RUN -o EXPORT
    python docs/examples/triple_classification.py EXPORT

Valid fits the thresholds and test measures them. Each split gets as many false triples as it has
true ones: the tail is another one that train has with the relation, and no split has the triple
(Socher et al. 2013, Reasoning With Neural Tensor Networks).

Shapes: T triples.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from kge_torchrec import load_model


def with_false(store: Any, split: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the triples of a split and false ones, (2T, 3), and which of them are true (2T,)."""
    random, known = np.random.default_rng(seed), store.filter_index()
    true = np.array(store.split(split), np.int64)
    false, is_known = true.copy(), np.ones(len(true), bool)
    for _ in range(100):  # draw again what is true
        for row in np.flatnonzero(is_known):
            tails = store.train[store.train[:, 1] == true[row, 1], 2]
            false[row, 2] = random.choice(tails)
        heads, relations, tails = false.T
        is_known = known.contains("tail", heads, relations, tails[:, None])[:, 0]
    kept = ~is_known  # a head that has every tail of its relation has no false triple
    return np.concatenate([true, false[kept]]), np.arange(len(true) + kept.sum()) < len(true)


def best_threshold(scores: np.ndarray, is_true: np.ndarray) -> float:
    """Return the score from which on "true" is right most often."""
    values, place = np.unique(-scores, return_inverse=True)  # from the largest score on
    gains = np.bincount(place, np.where(is_true, 1, -1)).cumsum()
    return float(-values[gains.argmax()]) if gains.max() > 0 else np.inf


def main() -> None:
    model = load_model(sys.argv[1])
    data = {split: with_false(model.store, split) for split in ("valid", "test")}
    fitted, measured = (model.scores(torch.from_numpy(ids)).numpy() for ids, _ in data.values())
    (valid, is_true), (test, expected) = data.values()
    everywhere = best_threshold(fitted, is_true)
    right = np.zeros(len(test), bool)
    for relation, label in enumerate(model.relation_labels.array.to_pylist()):
        here, there = valid[:, 1] == relation, test[:, 1] == relation
        threshold = best_threshold(fitted[here], is_true[here]) if here.any() else everywhere
        right[there] = (measured[there] >= threshold) == expected[there]
        if there.any():
            print(f"{label:<24} {there.sum():>6} triples  accuracy {right[there].mean():.3f}")
    print(f"{'all':<24} {len(right):>6} triples  accuracy {right.mean():.3f}")


if __name__ == "__main__":
    main()
