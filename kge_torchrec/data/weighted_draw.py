"""An epoch that has triples as often as they weigh.

Shapes: T triples, M positions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kge_torchrec.data.sort import CHUNK
from kge_torchrec.kernels.jit import kernel

Order = Callable[[np.ndarray], np.ndarray]  # (M,) positions of an epoch -> (M,) its triples
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


@kernel
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
