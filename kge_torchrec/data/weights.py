"""Weights of triples: how much each is believed, positive and finite numbers of a fourth column.

Shapes: T triples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kge_torchrec.errors import DataError


class NotAWeight(DataError):
    """A column holds something else than positive, finite numbers; ``row`` is the first."""

    def __init__(self, row: int):
        super().__init__("no positive, finite number")
        self.row = row


def parse_weights(column: pa.Array) -> pa.Array:
    """A column of numbers or text, (T,), as float32.

    Raises NotAWeight for a value that is none: null, no number, not positive or not finite, as it
    is in float32.
    """
    try:
        numbers = column.cast(pa.float64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise NotAWeight(_first_unreadable(column)) from None
    values = numbers.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        weights = values.astype(np.float32)
        good = np.isfinite(weights) & (weights > 0)
    if not good.all():
        raise NotAWeight(int(good.argmin()))
    return pa.array(weights)


def _first_unreadable(column: pa.Array) -> int:
    for row in range(len(column)):
        try:
            parse_weights(column.slice(row, 1)) if len(column) > 1 else column.cast(pa.float64())
        except (NotAWeight, pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return row
    return 0


def joined(
    blocks: Mapping[str, Sequence[np.ndarray | None]], needed: bool
) -> dict[str, np.ndarray]:
    """Per split, the weights (T,) float32 of its batches; splits without any are left out.

    needed: raise DataError where the triples to train on have none.  Raises it for a split of which
    some files have weights and others not.
    """
    found = {}
    for split, parts in blocks.items():
        weighted = [part for part in parts if part is not None]
        if weighted and len(weighted) < len(parts):
            raise DataError(f"{split}: some of its triples have a weight and others have none")
        if weighted:
            found[split] = np.concatenate(weighted)
    if needed and not found.keys() & {"train", "whole"}:
        raise DataError(
            "the training triples have no weights: give each a fourth column, a positive number"
        )
    return found


def summary(weights: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Per split, what the report says of its weights: min, mean and max."""
    return {
        split: {
            "min": float(values.min()),
            "mean": float(values.mean(dtype=np.float64)),
            "max": float(values.max()),
        }
        for split, values in weights.items()
        if len(values)
    }


def mean_of(weights: np.ndarray | None) -> float:
    """The mean of the weights of all training triples; 1 without weights.

    Losses are weighed over this mean rather than over that of a batch, which would make a triple
    count for more in a batch of light ones, all the more so the smaller the batch is.
    """
    return 1.0 if weights is None else float(weights.mean(dtype=np.float64))


def check_weights(use: str, weights: Any) -> None:
    """Raises DataError where training is to use weights that a store does not have.

    use: data.weights of the config; weights: (T,) of the training triples, or None.
    """
    if use != "ignore" and weights is None:
        raise DataError(
            f"data.weights {use}: the store has no weights; prepare it again from files with a "
            "fourth column (`prepare --weights`), or set data.weights to ignore"
        )
