"""Distances of all pairs on CUDA where no gradient is needed, by a kernel written in Triton.

Ranking uses it, and the first pass over the scores of all entities where these are not kept.
``torch.cdist`` starts a thread block for every pair, and the plain formulas write a tensor of all
differences.

Each program computes a tile of ``_QUERIES`` x ``_ROWS`` pairs. It adds up the elements of a pair
one after another, so the bits of a pair do not depend on its position, and equal rows tie. A tile
at the edge is padded with zeros, which are not written. The inputs are transposed first, so that
the threads of a tile read neighboring addresses; that costs one more pass over the rows.

Places are computed in 64 bits, so tensors may have any size.

Shapes: C chunks, b queries, K candidates, D elements (D/2 complex numbers) per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kge_torchrec.kernels.library import EPSILON, operator

_QUERIES, _ROWS = 16, 512  # pairs of a tile; a thread has 16 x 4 of them, in registers
_NO_VARIANTS = ["queries", "candidates", "dim"]  # one compiled kernel per kind, for every size


def _distances(query: Tensor, rows: Tensor, maps: Tensor | None, kind: str) -> Tensor:
    """Compute distances of all pairs; half precision is computed in float32.

    Args:
        query: (C, b, D).
        rows: (C, K, D).
        maps: (C, b, D) for the kinds of ``Mapped``, else None.
        kind: A name of ``Distance`` or ``Mapped``.

    Returns:
        (C, b, K).
    """
    out = _empty(query, rows, maps, kind)
    columns = [x.to(out.dtype).mT.contiguous() for x in (query, rows)]
    scales = columns[0] if maps is None else maps.to(out.dtype).mT.contiguous()
    chunks, queries, candidates = out.shape
    tiles = chunks * triton.cdiv(queries, _QUERIES) * triton.cdiv(candidates, _ROWS)
    _tile[(tiles,)](
        *columns, scales, out, queries, candidates, query.shape[-1], kind,
        EPSILON, _QUERIES, _ROWS, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _empty(query: Tensor, rows: Tensor, maps: Tensor | None, kind: str) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:2], rows.shape[1], dtype=dtype)


distances = operator("triton_distances", _distances, _empty, cuda=_distances)


@triton.jit(do_not_specialize=_NO_VARIANTS)
def _tile(
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
