"""Rows of a rank in blocks whose scores for all queries of a step are of bounded size.

For training against all entities; its plan counts with the same blocks.
"""

from __future__ import annotations

KEPT_BYTES = 256 << 20  # of a step's scores that are kept rather than computed twice
CPU_BLOCK_BYTES = 32 << 20
CUDA_BLOCK_BYTES = 256 << 20  # enough work per kernel launch


def block_bytes_of(device: str) -> int:
    """Scores of a block on a device of this kind, unless all are kept."""
    return CUDA_BLOCK_BYTES if device == "cuda" else CPU_BLOCK_BYTES


def score_blocks(rows: int, queries: int, kept_bytes: int, block_bytes: int) -> list[range]:
    """The n rows of a rank for Q queries: one block up to ``kept_bytes``, else several.

    Blocks of several have at most ``block_bytes`` of scores, but at least a row.
    """
    row_bytes = 4 * max(1, queries)
    whole = rows * row_bytes <= kept_bytes
    height = rows if whole else max(1, block_bytes // row_bytes)
    return [range(i, min(i + height, rows)) for i in range(0, rows, max(1, height))]
