"""Splits of triples of ids: repeated triples, and random splits for triples without any."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kge_torchrec.data.readers import SPLITS
from kge_torchrec.data.sort import CHUNK, repeats
from kge_torchrec.errors import DataError


def check_ratio(ratio: Sequence[float], seed: int) -> None:
    """Raise DataError unless ``ratio`` is three shares that sum to 1, the first positive."""
    if seed < 0:
        raise DataError(f"seed must be an integer >= 0, got {seed}")
    if len(ratio) != 3 or min(ratio) < 0 or ratio[0] <= 0 or not math.isclose(sum(ratio), 1):
        raise DataError(
            f"ratio {tuple(ratio)}: give the shares of train, valid and test, which sum to 1, "
            "such as (0.9, 0.05, 0.05)"
        )


def divide(
    triples: np.ndarray, ratio: Sequence[float], seed: int, num_entities: int, num_relations: int
) -> np.ndarray:
    """Return a random split for each of ``triples`` (T, 3): (T,) int8 places in ``SPLITS``.

    In a random order, the first triple of each entity and of each relation is in train.  Valid and
    test are sampled from the others, so they are smaller than ``ratio`` where few others are left.
    """
    total = len(triples)
    order = np.random.default_rng(seed).permutation(total)
    bound = np.zeros(total, bool)
    for columns, size in (((0, 2), num_entities), ((1,), num_relations)):
        first = np.full(size, total)
        for start in range(0, total, CHUNK):
            rows = triples.take(order[start : start + CHUNK], axis=0)
            places = np.arange(start, start + len(rows))
            for column in columns:
                np.minimum.at(first, rows[:, column], places)
        bound[first[first < total]] = True
    free = order[~bound]
    num_valid, num_test = (round(total * share) for share in ratio[1:])
    if num_valid + num_test > len(free):
        num_valid = len(free) * num_valid // (num_valid + num_test)
        num_test = len(free) - num_valid
    split_of = np.zeros(total, np.int8)
    split_of[free[:num_valid]] = 1
    split_of[free[num_valid : num_valid + num_test]] = 2
    return split_of


def by_split(rows: np.ndarray, split_of: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows (T, ...) of each split in the order of the input; ``split_of``: `divide`."""
    return {
        split: rows.take(np.flatnonzero(split_of == index), axis=0)
        for index, split in enumerate(SPLITS)
    }


def drop_repeats(
    triples: dict[str, np.ndarray], weights: dict[str, np.ndarray], sizes: tuple[int, int]
) -> dict[str, int]:
    """Keep every triple of a split once, at its first place, with the largest of its weights.

    Returns:
        The number of triples dropped, by split.
    """
    dropped = {}
    for split, rows in triples.items():
        again, first = repeats([*rows.T], (sizes[0], sizes[1], sizes[0]))
        dropped[split] = len(again)
        if not len(again):
            continue
        triples[split] = np.delete(rows, again, axis=0)
        if split in weights:
            own = weights[split]
            np.maximum.at(own, first, own[again])
            weights[split] = np.delete(own, again)
    return dropped
