"""Scores of pairs that are not a matrix product, one block of pairs at a time.

A block is recomputed for the gradient, so that a (b, K, D) tensor is never materialized. A pair's
score depends only on its own elements, so the block size does not change its bits.

Shapes: C chunks, b queries, K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kge_torchrec.kernels.library import block_device

# Elements per block of intermediates: fits a CPU's L2 cache, or gives a GPU enough work.
BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
_COMPILED_BLOCKS = 4


def pairwise(
    score: Callable[..., Tensor],
    queries: Sequence[Tensor],
    rows: Sequence[Tensor],
    width: int,
    *,
    compiles_whole: bool = False,
) -> Tensor:
    """Evaluate score(*queries, *rows) for all pairs of a chunk, block by block.

    Args:
        score: Function of broadcastable tensors.
        queries: Tensors (C, b, ·), passed to ``score`` as (C, block, 1, ·).
        rows: Tensors (C, K, ·), passed to ``score`` as (C, 1, K, ·).
        width: Elements per pair in the intermediates of ``score``.
        compiles_whole: Whether Inductor fuses ``score`` without a tensor per pair, so that compiled
            code needs no blocks.

    Returns:
        (C, b, K).
    """
    chunks, count = queries[0].shape[:2]
    rows = [x[:, None] for x in rows]
    elements = BLOCK_ELEMENTS[block_device(queries[0])]
    step = max(1, elements // max(1, chunks * rows[0].shape[2] * width))
    if torch.compiler.is_compiling():  # the compiler unrolls the blocks
        step = max(step, -(-count // (1 if compiles_whole else _COMPILED_BLOCKS)))
    parts = []
    for start in range(0, max(1, count), step):
        block = [x[:, start : start + step, None] for x in queries]
        if step < count and torch.is_grad_enabled():
            parts.append(checkpoint(score, *block, *rows, use_reentrant=False))
        else:
            parts.append(score(*block, *rows))
    return torch.cat(parts, 1)
