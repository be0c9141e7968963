"""Inner products of all pairs, and counts of scores, on CUDA without gradients, in Triton.

cuBLAS has another order of sums for each shape. So the score of a true answer differed in its last
bits from the same score in a block, and ties of equal rows broke: two thirds of them on an H200.
Here each pair adds its elements in one order, wherever it lies.

Each program computes a tile of ``QUERIES`` x ``ROWS`` pairs, ``ELEMENTS`` of both sides at a time.
A tile at the edge is padded with zeros, which are not written.  Places are computed in 64 bits, so
tensors may have any size.

Shapes: C chunks, b queries, K candidates, D elements per row; B queries, n scores of a block, M
values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kge_torchrec.kernels.library import operator
from kge_torchrec.kernels.triton_distances import _place

# The fastest of eleven on an H200: 13 to 20 TFLOP/s for 32 to 2,000 elements, 512 queries.
QUERIES, ROWS, ELEMENTS, _WARPS, _STAGES = 128, 64, 16, 4, 3
_WIDTH, _PASSES = 1024, 16  # scores that a program reads at a time, and how often


def _products(query: Tensor, rows: Tensor) -> Tensor:
    """Compute inner products of all pairs in float32, without TF32.

    Args:
        query: (C, b, D).
        rows: (C, K, D).

    Returns:
        (C, b, K) float32.
    """
    query, rows, out = query.float().contiguous(), rows.float().contiguous(), _empty(query, rows)
    chunks, queries, candidates = out.shape
    tiles = chunks * triton.cdiv(queries, QUERIES) * triton.cdiv(candidates, ROWS)
    dim = query.shape[-1]
    unit = 1 if dim % 4 else 4  # a thread reads four neighbors at once where rows begin at such
    _product[(tiles,)](
        query, rows, out, queries, candidates, dim // unit, unit, QUERIES, ROWS, ELEMENTS,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


def _empty(query: Tensor, rows: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:2], rows.shape[1], dtype=torch.float32)


products = operator("triton_products", _products, _empty, cuda=_products)


@triton.jit(do_not_specialize=["queries", "candidates", "units"])
def _product(
    query: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    queries: tl.tensor,
    candidates: tl.tensor,
    units: tl.tensor,
    UNIT: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
) -> None:
    """Compute one tile from query (C, b, D) and rows (C, K, D), with D = units * UNIT."""
    dim = units * UNIT
    chunk, q, r = _place(tl.program_id(0), queries, candidates, QUERIES, ROWS)
    inside, among, element = q < queries, r < candidates, tl.arange(0, ELEMENTS)
    query += (chunk * queries + q)[:, None] * dim + element[None]
    rows += (chunk * candidates + r)[None] * dim + element[:, None]
    total = tl.zeros((QUERIES, ROWS), tl.float32)
    for start in range(0, dim, ELEMENTS):
        there = start + element < dim
        left = tl.load(query, inside[:, None] & there[None], 0)
        right = tl.load(rows, among[None] & there[:, None], 0)
        total = tl.dot(left, right, total, input_precision="ieee")
        query += ELEMENTS
        rows += ELEMENTS
    place = (chunk * queries + q)[:, None] * candidates + r[None]
    tl.store(out + place, total, inside[:, None] & among[None])


@torch.library.custom_op("kge_torchrec::triton_counts", mutates_args=("less", "equal"))
def counts(
    scores: Tensor, values: Tensor, query: Tensor | None, less: Tensor, equal: Tensor
) -> None:
    """Add to less and equal (M,) int64 how many scores of a query are below, or equal, a value.

    Args:
        scores: (B, n) float32, contiguous.
        values: (M,) float32.
        query: (M,) int64, the row of scores that each value belongs to.  None: M is B.
        less: (M,), contiguous.
        equal: (M,), contiguous.
    """
    width = scores.shape[1]
    parts = triton.cdiv(width, _WIDTH * _PASSES)
    if len(values) * parts:
        rows = values if query is None else query
        _counts[(len(values) * parts,)](
            scores, values, rows, less, equal, width, query is not None, _WIDTH, _PASSES
        )


@triton.jit(do_not_specialize=["width"])
def _counts(
    scores: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,
    less: tl.tensor,
    equal: tl.tensor,
    width: tl.tensor,
    HAS_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PASSES: tl.constexpr,
) -> None:
    """Count a part of a query's scores; sums of integers do not depend on their order."""
    program, parts = tl.program_id(0).to(tl.int64), tl.cdiv(width, WIDTH * PASSES)
    value_of, first = program // parts, program % parts * WIDTH * PASSES
    row = tl.load(rows + value_of) if HAS_ROWS else value_of
    value, lanes = tl.load(values + value_of), tl.arange(0, WIDTH)
    below, same = tl.zeros((WIDTH,), tl.int32), tl.zeros((WIDTH,), tl.int32)
    for i in range(PASSES):
        column = first + i * WIDTH + lanes
        # A NaN is neither below nor equal.
        score = tl.load(scores + row * width + column, column < width, float("nan"))
        below += (score < value).to(tl.int32)
        same += (score == value).to(tl.int32)
    tl.atomic_add(less + value_of, tl.sum(below, 0).to(tl.int64))
    tl.atomic_add(equal + value_of, tl.sum(same, 0).to(tl.int64))
