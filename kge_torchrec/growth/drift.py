"""How far the rows of entities lie apart in two checkpoints, read in the memory of a few pieces.

Shapes: n rows compared, D numbers each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kge_torchrec.training.growth import entity_rows


def drift_of(before: Path, after: Path, rows: int) -> dict[str, Any]:
    """Of the first rows of two checkpoints, one and the other by id.

    Returns {"rows", "unchanged": rows that are the same bit for bit, "mean", "max": Euclidean
    distances as shares of the row's length before, "cosine": the mean over rows}.  Raises Damaged
    or OSError for what cannot be read.
    """
    unchanged, distances, largest, cosines, start = 0, 0.0, 0.0, 0.0, 0
    for one in entity_rows(before, rows):
        other = torch.cat(list(entity_rows(after, start + len(one), start)))
        unchanged += int((one == other).all(1).sum())
        one, other = one.double(), other.double()
        moved = (other - one).norm(dim=1) / one.norm(dim=1).clamp_min(1e-30)
        distances += float(moved.sum())
        largest = max(largest, float(moved.max()))
        cosines += float(torch.cosine_similarity(one, other).sum())
        start += len(one)
    return {
        "rows": rows,
        "unchanged": unchanged,
        "mean": distances / rows,
        "max": largest,
        "cosine": cosines / rows,
    }
