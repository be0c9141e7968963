"""Scores of all pairs on CUDA where no gradient is needed, written in Triton: distances, products.

Each pair adds its elements in one order, wherever it lies, so equal rows tie in ranking.

Brings: cuBLAS has another order of sums for each shape, which broke two thirds of the ties of equal
rows on an H200. ``torch.cdist`` starts a thread block for every pair, and the plain formulas of the
other distances write a tensor of all differences.

Each program computes a tile of pairs; padding at an edge is not written. Places are computed in 64
bits, so tensors may have any size.

Shapes: C chunks, b queries, K candidates, D elements (D/2 complex numbers) per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kge_torchrec.kernels.library import EPSILON, operator

DISTANCE_TILE = 16, 512  # queries and rows; a thread has 16 x 4 of their pairs, in registers
# Queries, rows and elements at a time. The fastest of eleven on an H200: 13 to 20 TFLOP/s for 32
# to 2,000 elements, 512 queries.
PRODUCT_TILE = 128, 64, 16
WARPS, _STAGES = 4, 3  # of products


def _distances(query: Tensor, rows: Tensor, maps: Tensor | None, kind: str) -> Tensor:
    """Compute distances as ``comparisons.distance``; half precision is computed in float32.

    The inputs are transposed first, so that the threads of a tile read neighboring addresses; that
    costs one more pass over the rows.
    """
    out = _empty_distances(query, rows, maps, kind)
    columns = [x.to(out.dtype).mT.contiguous() for x in (query, rows)]
    scales = columns[0] if maps is None else maps.to(out.dtype).mT.contiguous()
    _distance[(_count_tiles(out, *DISTANCE_TILE[:2]),)](
        *columns, scales, out, *out.shape[1:], query.shape[-1], kind,
        EPSILON, *DISTANCE_TILE, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _empty_distances(query: Tensor, rows: Tensor, maps: Tensor | None, kind: str) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:2], rows.shape[1], dtype=dtype)


distances = operator("triton_distances", _distances, _empty_distances)


def _count_tiles(out: Tensor, queries: int, rows: int) -> int:
    """Return how many tiles of some queries and rows cover all pairs (C, b, K)."""
    chunks, all_queries, candidates = out.shape
    return int(chunks * triton.cdiv(all_queries, queries) * triton.cdiv(candidates, rows))


# Not specialized: one compiled kernel per kind serves every size.
@triton.jit(do_not_specialize=["queries", "candidates", "dim"])
def _distance(
    query: tl.tensor,
    rows: tl.tensor,
    maps: tl.tensor,
    out: tl.tensor,
    queries: tl.tensor,
    candidates: tl.tensor,
    dim: tl.tensor,
    KIND: tl.constexpr,
    EPSILON: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute one tile from query, maps (C, D, b) and rows (C, D, K)."""
    chunk, q, r = _place(tl.program_id(0), queries, candidates, QUERIES, ROWS)
    inside, among = q < queries, r < candidates
    query += chunk * dim * queries + q
    maps += chunk * dim * queries + q
    rows += chunk * dim * candidates + r
    total = tl.zeros((QUERIES, ROWS), out.dtype.element_ty)
    if KIND == "moduli":
        for _ in range(dim // 2):
            real = _difference(query, rows, maps, inside, among, KIND)
            query += queries
            rows += candidates
            imaginary = _difference(query, rows, maps, inside, among, KIND)
            query += queries
            rows += candidates
            total += tl.sqrt(real * real + imaginary * imaginary + EPSILON)
    else:
        for _ in range(dim):
            difference = _difference(query, rows, maps, inside, among, KIND)
            if KIND == "manhattan" or KIND == "scaled_manhattan":
                total += tl.abs(difference)
            else:
                total += difference * difference
            query += queries
            maps += queries
            rows += candidates
        if KIND == "euclidean":
            total = tl.sqrt(total)
    place = (chunk * queries + q)[:, None] * candidates + r[None]
    tl.store(out + place, total, inside[:, None] & among[None])


@triton.jit
def _place(
    program: tl.tensor,
    queries: tl.tensor,
    candidates: tl.tensor,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the chunk of a tile, its queries and its rows, in int64.

    Neighboring programs have the same rows, which stay in the cache.
    """
    tile = program.to(tl.int64)
    across, down = tl.cdiv(queries, QUERIES), tl.cdiv(candidates, ROWS)
    q = tile % across * QUERIES + tl.arange(0, QUERIES)
    r = tile // across % down * ROWS + tl.arange(0, ROWS)
    return tile // across // down, q, r


@triton.jit
def _difference(
    query: tl.tensor,
    rows: tl.tensor,
    maps: tl.tensor,
    inside: tl.tensor,
    among: tl.tensor,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Return the differences of one element of all pairs of a tile."""
    point = tl.load(rows, among, 0)[None]
    if KIND == "scaled_manhattan" or KIND == "scaled_squares":
        point = tl.load(maps, inside, 0)[:, None] * point
    return tl.load(query, inside, 0)[:, None] - point


def _products(query: Tensor, rows: Tensor) -> Tensor:
    """Compute inner products (C, b, K) of all pairs in float32, without TF32."""
    query, rows = query.float().contiguous(), rows.float().contiguous()
    out, dim = _empty_products(query, rows), query.shape[-1]
    unit = 1 if dim % 4 else 4  # a thread reads four neighbors at once where rows begin at such
    _product[(_count_tiles(out, *PRODUCT_TILE[:2]),)](
        query, rows, out, *out.shape[1:], dim // unit, unit, *PRODUCT_TILE,
        num_warps=WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


def _empty_products(query: Tensor, rows: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:2], rows.shape[1], dtype=torch.float32)


products = operator("triton_products", _products, _empty_products)


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
