"""How far the rows of entities lie apart in two checkpoints, read in the memory of a few pieces.

Shapes: n rows compared, D numbers each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kge_torchrec.embeddings.backend import ENTITY_WEIGHT
from kge_torchrec.training.checkpoint_index import Damaged, Index, dtype_of, pieces_of, read_piece
from kge_torchrec.training.checkpoints import open_checkpoint

_TABLE = f"engine.model.{ENTITY_WEIGHT}"


def drift_of(before: Path, after: Path, rows: int) -> dict[str, Any]:
    """Of the first rows of two checkpoints, one and the other by id.

    Returns {"rows", "unchanged": rows that are the same bit for bit, "mean", "max": Euclidean
    distances as shares of the row's length before, "cosine": the mean over rows}.  Raises Damaged
    or OSError for what cannot be read.
    """
    unchanged, distances, largest, cosines, start = 0, 0.0, 0.0, 0.0, 0
    for one in _rows(before, rows):
        other = torch.cat(list(_rows(after, start + len(one), start)))
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


def _rows(checkpoint: Path, stop: int, start: int = 0) -> Iterator[Tensor]:
    """Rows [start, stop) of the table in order, as they lie in pieces."""
    index: Index | None = open_checkpoint(checkpoint)[0]
    if index is None:
        raise Damaged(f"{checkpoint} is of the first format")
    entry = index[_TABLE]
    for piece in sorted(pieces_of(entry), key=lambda piece: piece["offset"][0]):
        first, count = piece["offset"][0], piece["size"][0]
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            rows = read_piece(checkpoint, _TABLE, dtype_of(entry), piece)
            yield rows[low - first : high - first]
