"""Weights of triples: how much each is believed, and drawing triples in proportion to it.

They come from a fourth column of the input and are positive and finite.

Shapes: T triples, M positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numba
import numpy as np
import pyarrow as pa

from kge_torchrec.data.sort import CHUNK
from kge_torchrec.errors import DataError

Order = Callable[[np.ndarray], np.ndarray]  # (M,) positions of an epoch -> (M,) its triples


class NotAWeight(ValueError):
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


STEP = 64  # triples between two sums of weights
_STREAM = 4  # sets offsets apart from other draws of the same seed and epoch


class WeightedDraw:
    """Which triples an epoch passes through where each comes in proportion to its weight.

    Systematic sampling (Madow and Madow 1944): T equally spaced places on the line of weights laid
    end to end, from an offset that each epoch draws.  A triple of weight w comes either floor or
    ceil of w / mean weight times in an epoch, on average exactly as often; with equal weights it
    comes once.  Holds the sum of weights before every 64th triple; all else is read where it lies.

    weights: (T,) float32; may be memory-mapped.
    """

    def __init__(self, weights: np.ndarray):
        self._weights = np.asarray(weights).view()
        self._weights.flags.writeable = False
        self._sums = np.zeros(-(-len(weights) // STEP) + 1)
        for start in range(0, len(weights), CHUNK):  # a multiple of STEP
            part = weights[start : start + CHUNK].astype(np.float64)
            sums = np.add.reduceat(part, np.arange(0, len(part), STEP))
            first = start // STEP + 1
            self._sums[first : first + len(sums)] = sums
        np.cumsum(self._sums, out=self._sums)

    def of(self, order: Order, seed: int, epoch: int) -> Order:
        """An epoch's order, a function of (seed, epoch, position) as ``order`` is."""
        words = np.random.SeedSequence(seed, spawn_key=(epoch, _STREAM)).generate_state(
            1, np.uint64
        )
        offset = float(words[0] >> np.uint64(11)) * 2.0**-53

        def draw(positions: np.ndarray) -> np.ndarray:
            places = (order(positions) + offset) / len(self._weights)
            total = self._sums[-1]
            targets = np.minimum(places * total, np.nextafter(total, 0.0))
            found = np.empty(len(targets), np.int64)
            _walk(self._weights, self._sums, STEP, targets, found)
            return found

        return draw


@numba.njit(cache=True, nogil=True)
def _walk(
    weights: np.ndarray, sums: np.ndarray, step: int, targets: np.ndarray, found: np.ndarray
) -> None:
    """The first triple at which the sum of weights exceeds each target."""
    for i in range(len(targets)):
        block = np.searchsorted(sums, targets[i], side="right") - 1
        place = block * step
        last = min(place + step, len(weights)) - 1
        total = sums[block] + weights[place]
        while total <= targets[i] and place < last:  # rounding may leave the last one short
            place += 1
            total += weights[place]
        found[i] = place


def check_weights(use: str, weights: Any) -> None:
    """Raises DataError where training is to use weights that a store does not have.

    use: data.weights of the config; weights: (T,) of the training triples, or None.
    """
    if use != "ignore" and weights is None:
        raise DataError(
            f"data.weights {use}: the store has no weights; prepare it again from files with a "
            "fourth column (`prepare --weights`), or set data.weights to ignore"
        )
