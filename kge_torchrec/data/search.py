"""Look-ups in the filter index: compiled for many queries, by numpy for a handful.

Numba takes a second to load, which whoever prepares or opens a store, or asks one question, need
not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

FEW = 8  # queries


def find_ranges(
    indptr: np.ndarray, row_relations: np.ndarray, anchors: np.ndarray, relations: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where the answers of each query (anchor, relation) lie: starts (B,), stops (B,)."""
    if len(anchors) > FEW:
        from kge_torchrec.data.store import search as compiled_search

        return compiled_search.find_ranges(indptr, row_relations, anchors, relations)
    rows = list(zip(indptr[anchors].tolist(), indptr[anchors + 1].tolist(), strict=True))
    starts = _places(row_relations, rows, relations, "left")
    return starts, _places(row_relations, rows, relations, "right")


def narrow(
    ids: np.ndarray, starts: np.ndarray, stops: np.ndarray, first: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """The parts of ascending ranges of ``ids`` whose ids lie in [first, last): starts, stops."""
    if len(starts) > FEW:
        from kge_torchrec.data.store import search as compiled_search

        return compiled_search.narrow(ids, starts, stops, first, last)
    ranges = list(zip(starts.tolist(), stops.tolist(), strict=True))
    lows = _places(ids, ranges, [first] * len(ranges), "left")
    return lows, _places(ids, ranges, [last - 1] * len(ranges), "right")


def mark_members(
    entities: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    candidates: np.ndarray,
    found: np.ndarray,
) -> None:
    """Sets ``found[b, k]`` where ``candidates[b, k]`` is in the ascending range of query b."""
    if len(starts) > FEW:
        from kge_torchrec.data.store import search as compiled_search

        compiled_search.mark_members(entities, starts, stops, candidates, found)
        return
    for query, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        answers, wanted = entities[start:stop], candidates[query].astype(entities.dtype)
        place = np.searchsorted(answers, wanted)
        inside = np.flatnonzero(place < len(answers))
        found[query, inside] |= answers[place[inside]] == wanted[inside]


def _places(
    values: np.ndarray,
    ranges: list[tuple[int, int]],
    wanted: np.ndarray | Sequence[int],
    side: Literal["left", "right"],
) -> np.ndarray:
    """Where each wanted value has its place in its range of ascending ``values``, (B,) int64."""
    wanted = np.asarray(wanted).astype(values.dtype)  # or numpy would convert the whole range
    found = [
        low + np.searchsorted(values[low:high], value, side)
        for (low, high), value in zip(ranges, wanted, strict=True)
    ]
    return np.array(found, np.int64)
