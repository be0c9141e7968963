"""Scores of all pairs of queries and rows, without their large intermediates in memory.

For scores that are no matrix product: a block of pairs at a time is expanded, and expanded again
for its gradient.  A pair's score is computed from its own numbers alone, so that blocks do not
change its bits.

Shapes: C chunks, b queries, K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kge_torchrec.models.block_device import block_device

# Numbers of a block's intermediates: what stays in a CPU's L2 cache, enough work for a GPU.
BLOCK_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 25}


def pairwise(
    score: Callable[..., Tensor], queries: Sequence[Tensor], rows: Sequence[Tensor], width: int
) -> Tensor:
    """score(*queries, *rows) for all pairs of a chunk: (C, b, K).

    queries: (C, b, ·) each, handed to score as (C, block, 1, ·); rows: (C, K, ·) each, handed to
    it as (C, 1, K, ·).  width: numbers that score expands a pair to.
    """
    chunks, count = queries[0].shape[:2]
    rows = [x[:, None] for x in rows]
    numbers = BLOCK_NUMBERS[block_device(queries[0])]
    step = max(1, numbers // max(1, chunks * rows[0].shape[2] * width))
    parts = []
    for start in range(0, max(1, count), step):
        block = [x[:, start : start + step, None] for x in queries]
        if step < count and torch.is_grad_enabled():
            parts.append(checkpoint(score, *block, *rows, use_reentrant=False))
        else:
            parts.append(score(*block, *rows))
    return torch.cat(parts, 1)
