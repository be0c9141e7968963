"""Distances of all pairs of a query and a row, and the choice of their implementation.

Distances keep full precision. The matrix-product form of the Euclidean distance
(``squares_by_products``) is many times faster but loses digits where distances are small; ranking
with it would disagree with the scores of single triples. Only training uses it. On a CPU the
kernels of ``pair_scores`` compute distances; training on CUDA uses ``fused_distances``. Ranking
uses kernels whose result for a pair does not depend on its position, so that ties stay ties.

Shapes: C chunks, b queries, K candidates, U rows, D elements (D/2 complex numbers) per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kge_torchrec.kernels.fused_distances import fused, is_fused
from kge_torchrec.kernels.kinds import EPSILON, Comparison, Mapped, block_device
from kge_torchrec.models.ops import BLOCK_NUMBERS, pairwise, pick

_LINE = 16  # float32 values per cache line of 64 bytes
_FEW_PAIRS = 1 << 20  # smaller results stay in cache, where alignment does not matter
_EXACT = "donot_use_mm_for_euclid_dist"


def euclidean(query: Tensor, rows: Tensor) -> Tensor:
    """Compute Euclidean distances: (C, b, D), (C, K, D) -> (C, b, K)."""
    if is_fused(query):
        return fused("euclidean", query, rows)
    if has_kernels(query):
        return _pair_scores("euclidean", query, rows)
    return torch.cdist(query, rows, p=2.0, compute_mode=_EXACT)


def squares_by_products(query: Tensor, rows: Tensor) -> Tensor:
    """Compute minus the squared distances, 2 <q, t> - |q|^2 - |t|^2, by one matrix product.

    Results that are small compared with the lengths lose digits and may have the wrong sign. The
    squared lengths are extra columns of the product, which adds them in float32 even where autocast
    or the CPU rounds the factors. Autocast to float16 is turned off, because its largest number is
    65,504.

    Args:
        query: (C, b, D).
        rows: (C, K, D).

    Returns:
        (C, b, K).
    """
    of_query, of_row = _lengths(query), _lengths(rows)
    left = torch.cat([2 * query, -of_query, torch.ones_like(of_query)], -1)
    right = torch.cat([rows, torch.ones_like(of_row), -of_row], -1)
    device = block_device(rows)
    takes_half = torch.get_autocast_dtype(device) == torch.bfloat16
    with nullcontext() if takes_half else torch.autocast(device, enabled=False):
        return aligned_products(left, right)


def products(query: Tensor, rows: Tensor) -> Tensor:
    """Compute the inner products of all pairs of a chunk: (C, b, D), (C, K, D) -> (C, b, K)."""
    if len(query) != 1:
        return torch.matmul(query, rows.transpose(-1, -2))
    # Not as a batch of one, which would give the gradient of the rows a transposed layout.
    return torch.matmul(query, rows.squeeze(0).t())


def aligned_products(query: Tensor, rows: Tensor) -> Tensor:
    """Compute ``products`` with an aligned result; last digits and strides may differ.

    On a CPU a float32 product takes up to twice as long if the rows of the result do not begin at a
    cache line.
    """
    is_one = len(query) == 1 and query.device.type == "cpu" and rows.shape[1] % _LINE != 0
    is_float = query.dtype == rows.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if is_one and is_float and query.shape[1] * rows.shape[1] >= _FEW_PAIRS:
        return _AlignedProducts.apply(query[0], rows[0])[None]
    return products(query, rows)


class _AlignedProducts(torch.autograd.Function):
    """Inner products (b, D), (K, D) -> (b, K) whose rows begin at a cache line.

    With 14,541 rows, a product of 200 or 512 queries takes 0.4 to 0.7 of the time.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(query, rows)
        width = -(-len(rows) // _LINE) * _LINE
        out = query.new_empty(len(query), width)[:, : len(rows)]
        return torch.mm(query, rows.t(), out=out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        query, rows = ctx.saved_tensors
        of_query, of_rows = ctx.needs_input_grad
        return grad @ rows if of_query else None, grad.t() @ query if of_rows else None


def _lengths(rows: Tensor) -> Tensor:
    """Return squared lengths, split into three bfloat16 values that add up: (..., D) -> (..., 3).

    float64 is never rounded, so its lengths are not split: (..., D) -> (..., 1).
    """
    if rows.dtype == torch.float64:
        return rows.square().sum(-1, keepdim=True)
    rest = rows.float().square().sum(-1, keepdim=True)
    parts = []
    for _ in range(3):
        parts.append(rest.bfloat16().float())  # the first part has the whole gradient
        rest = rest - parts[-1]
    return torch.cat(parts, -1)


def euclidean_by_products(query: Tensor, rows: Tensor) -> Tensor:
    """Compute minus the distances by a matrix product: (C, b, D), (C, K, D) -> (C, b, K)."""
    squares = squares_by_products(query, rows)
    squares = squares.to(torch.promote_types(squares.dtype, torch.float32))
    return -(-squares).clamp_min(EPSILON).sqrt()


def manhattan(query: Tensor, rows: Tensor) -> Tensor:
    """Compute Manhattan distances: (C, b, D), (C, K, D) -> (C, b, K)."""
    if is_fused(query):
        return fused("manhattan", query, rows)
    if has_kernels(query):
        return _pair_scores("manhattan", query, rows)
    return torch.cdist(query, rows, p=1.0)


def compared_at(comparison: Comparison, query: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """Compare each query with the rows that its chunk selects.

    The CPU kernels do not copy rows, even if several chunks select them.

    Args:
        comparison: The comparison.
        query: (C, b, D).
        rows: (U, D).
        index: (C, K) int64 positions in ``rows``.

    Returns:
        (C, b, K).
    """
    if has_kernels(query):
        return _pair_scores(comparison, query, rows, index)
    picked = pick(rows, index)
    if comparison == "dot":
        return torch.matmul(query, picked.transpose(-1, -2))
    distances = {"euclidean": euclidean, "manhattan": manhattan, "moduli": complex_distance}
    return distances[comparison](query, picked)


def mapped(
    kind: Mapped, query: Tensor, maps: Tensor, rows: Tensor, index: Tensor | None = None
) -> Tensor:
    """Compute distances between queries and rows that each query's map scales or projects.

    Args:
        kind: The distance and map, a key of ``MAPPED``.
        query: (C, b, D).
        maps: (C, b, D) scales or normals, one per query.
        rows: (C, K, D), or (U, D) with an index.
        index: (C, K) int64 positions in ``rows``, or None.

    Returns:
        (C, b, K).
    """
    if index is not None and not has_kernels(query):
        rows, index = pick(rows, index), None
    if is_fused(query):
        return fused(kind, query, rows, maps)
    if has_kernels(query):
        return _pair_scores(kind, query, rows, index, maps)
    return pairwise(MAPPED[kind], [query, maps], [rows], query.shape[-1])


def scaled_manhattan(query: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """Sum |query - scale * row| over the elements: (..., D) each -> (...)."""
    return (query - scale * rows).abs().sum(-1)


def scaled_squares(query: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """Sum (query - scale * row)^2 over the elements: (..., D) each -> (...)."""
    return (query - scale * rows).square().sum(-1)


def hyperplane_squares(query: Tensor, normal: Tensor, rows: Tensor) -> Tensor:
    """Return squared distances on the hyperplane of a unit normal: (..., D) each -> (...)."""
    difference = query - rows
    along = (difference * normal).sum(-1, keepdim=True)
    return (difference - along * normal).square().sum(-1)


MAPPED: dict[Mapped, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "scaled_manhattan": scaled_manhattan,
    "scaled_squares": scaled_squares,
    "hyperplane_squares": hyperplane_squares,
}


def has_kernels(query: Tensor) -> bool:
    """Whether ``pair_scores`` supports these tensors: on a CPU, except in double precision."""
    return query.device.type == "cpu" and query.dtype != torch.float64


def _pair_scores(*given: Any) -> Tensor:
    from kge_torchrec.kernels.pair_scores import pair_scores  # numba loads slowly

    return pair_scores(*given)


def complex_distance(query: Tensor, rows: Tensor) -> Tensor:
    """Sum the moduli |query_k - row_k| over k: (C, b, D), (C, K, D) -> (C, b, K)."""
    if is_fused(query):
        return fused("moduli", query, rows)
    if has_kernels(query):
        return _pair_scores("moduli", query, rows)
    return _ComplexDistance.apply(query, rows)


def _query_blocks(query: Tensor, rows: Tensor) -> Iterator[slice]:
    """Yield slices of the b queries whose pairwise differences fit in the cache."""
    chunks, count, dim = query.shape
    step = max(1, BLOCK_NUMBERS[block_device(query)] // max(1, chunks * rows.shape[1] * dim))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _differences(query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return real parts, imaginary parts and moduli of differences, (C, block, K, D/2) each."""
    real = query[..., None, 0::2] - rows[:, None, :, 0::2]
    imaginary = query[..., None, 1::2] - rows[:, None, :, 1::2]
    modulus = torch.addcmul(real * real, imaginary, imaginary).add_(EPSILON).sqrt_()
    return real, imaginary, modulus


class _ComplexDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(query, rows)
        out = query.new_empty(query.shape[0], query.shape[1], rows.shape[1])
        for block in _query_blocks(query, rows):
            out[:, block] = _differences(query[:, block], rows)[2].sum(-1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        query, rows = ctx.saved_tensors
        grad_query, grad_rows = torch.zeros_like(query), torch.zeros_like(rows)
        for block in _query_blocks(query, rows):
            real, imaginary, modulus = _differences(query[:, block], rows)
            slope = grad[:, block, :, None] / modulus
            for offset, part in ((0, real), (1, imaginary)):
                part *= slope
                grad_query[:, block, offset::2] = part.sum(2)
                grad_rows[..., offset::2] -= part.sum(1)
        return grad_query, grad_rows
