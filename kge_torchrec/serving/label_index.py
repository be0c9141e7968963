"""A text index of labels, for completions of a prefix and for labels similar to a misspelled one.

Labels are sorted twice, by their first and by their last characters. A lookup reads a bounded
number of labels, independent of the size of the vocabulary.

Shapes: N labels, M keys.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

COMPARED = 200  # characters of a label that the index compares
NEIGHBORS = 32  # labels to compare on each side of a position
VARIANTS = 64  # positions of a label to check for a typing error
AT_ONCE = 100_000  # the most labels to sort before the server starts; more are sorted afterwards


class LabelIndex:
    """Two sorted orders of N labels, 8 bytes per label (16 from N = 2^31).

    A thread sorts a large vocabulary. Until it ends, ``ready`` is False and lookups find nothing.
    """

    def __init__(self, labels: pa.Array):
        self._labels = labels
        self._orders: tuple[_Order, _Order] | None = None
        thread = threading.Thread(target=self._sort, name="label index", daemon=True)
        thread.start()
        if len(labels) <= AT_ONCE:
            thread.join()

    def _sort(self) -> None:
        self._orders = _Order(self._labels, _beginnings), _Order(self._labels, _reversed_ends)

    @property
    def ready(self) -> bool:
        return self._orders is not None

    def beginning_with(self, text: str, first: int, count: int) -> tuple[list[str], int]:
        """Return ``count`` labels with a prefix from the ``first`` on, and the number of all.

        Labels come in order of text. Case is ignored. The prefix has at most ``COMPARED``
        characters.
        """
        if self._orders is None:
            return [], 0
        key = _key(text)
        start, stop = self._orders[0].places([key, f"{key}\U0010ffff"]).tolist()
        positions = np.arange(start + first, max(start + first, min(start + first + count, stop)))
        return self._orders[0].labels(positions), stop - start

    def close_to(self, label: str) -> list[str]:
        """Return up to 3 similar labels, best first; compares at most about 600 labels."""
        if self._orders is None or not 0 < len(label) <= COMPARED:
            return []
        by_beginning, by_end = self._orders
        key = _key(label)
        # The key without one character, and with two adjacent characters swapped.
        cuts = range(min(len(key), VARIANTS))
        variants = [key[:i] + key[i + 1 :] for i in cuts]
        variants += [key[:i] + key[i + 1 : i + 2] + key[i] + key[i + 2 :] for i in cuts]
        place, *near_variants = by_beginning.places([key, *variants]).tolist()
        wide = np.arange(place - NEIGHBORS, place + NEIGHBORS)
        near = np.unique(np.concatenate([wide, *(np.arange(x - 1, x + 2) for x in near_variants)]))
        place = int(by_end.places([key[::-1]])[0])
        candidates = by_beginning.labels(near)
        candidates += by_end.labels(np.arange(place - NEIGHBORS, place + NEIGHBORS))
        spelled: dict[str, str] = {}
        for candidate in candidates:
            if len(candidate) <= COMPARED:
                spelled.setdefault(candidate.lower(), candidate)
        return [spelled[match] for match in difflib.get_close_matches(label.lower(), spelled)]


class _Order:
    """The ids of all labels, sorted by a key."""

    def __init__(self, labels: pa.Array, key: Callable[[pa.Array], pa.Array]):
        self._labels, self._key = labels, key
        kind = np.int32 if len(labels) < 1 << 31 else np.int64
        self._ids = pc.sort_indices(key(labels)).to_numpy().astype(kind)

    def places(self, keys: list[str]) -> np.ndarray:
        """Return the number of labels before each key, (M,) int64, by binary search."""
        low, high = np.zeros(len(keys), np.int64), np.full(len(keys), len(self._ids))
        while (unsettled := low < high).any():
            middle = (low + high) // 2
            ids = self._ids[np.minimum(middle, len(self._ids) - 1)]
            texts = self._key(self._labels.take(pa.array(ids))).to_pylist()
            below = [text < key for text, key in zip(texts, keys, strict=True)]
            low = np.where(unsettled & below, middle + 1, low)
            high = np.where(unsettled & ~np.array(below), middle, high)
        return low

    def labels(self, places: np.ndarray) -> list[str]:
        """Return the labels at the given positions; ignore positions out of range."""
        inside = places[(places >= 0) & (places < len(self._ids))]
        return self._labels.take(pa.array(self._ids[inside])).to_pylist()


def _beginnings(labels: pa.Array) -> pa.Array:
    return pc.utf8_lower(pc.utf8_slice_codeunits(labels, 0, COMPARED))


def _reversed_ends(labels: pa.Array) -> pa.Array:
    return pc.utf8_reverse(pc.utf8_lower(pc.utf8_slice_codeunits(labels, -COMPARED)))


def _key(text: str) -> str:
    """Return the form of a text that the index compares."""
    return _beginnings(pa.array([text], pa.large_string()))[0].as_py()
