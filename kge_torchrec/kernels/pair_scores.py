"""Scores of pairs of a query and a row on a CPU: the operators over ``pair_kernels``.

    dot                 <q, x>
    manhattan           sum |q - x|
    euclidean           ||q - x||
    moduli              sum of |q - x| over complex numbers, interleaved as (re, im)

A query may have a second vector m, which maps rows before they are compared with it:

    scaled_manhattan    sum |q - m x|
    scaled_squares      ||q - m x||^2
    hyperplane_squares  ||d - m <m, d>||^2, d = q - x, the projection of d onto the hyperplane with
                        normal m

A row is given by its position in a table, so that a candidate of many queries is neither copied for
each of them nor given a gradient for each.

Shapes: C chunks, b queries per chunk, K candidates per chunk, U rows, D elements per row; M
elements per map, D or 0 without maps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kge_torchrec.kernels import pair_kernels as kernels
from kge_torchrec.kernels.jit import BlockKernel
from kge_torchrec.kernels.library import Compared, Mapped, arrays, operator
from kge_torchrec.kernels.row_sums import by_row, check_candidates


def pair_scores(
    kind: Compared | Mapped,
    query: Tensor,
    rows: Tensor,
    index: Tensor | None = None,
    maps: Tensor | None = None,
) -> Tensor:
    """Compare every query with the candidates of its chunk.

    Half precision is computed in float32.

    Args:
        kind: The comparison. "moduli" needs an even D.
        query: (C, b, D).
        rows: (U, D), or (C, K, D) without an index.
        index: (C, K) int64 positions of the candidates in ``rows``, or None.
        maps: (C, b, D), the second vector of each query if the kind has one; those of
            "hyperplane_squares" have length 1 or 0.

    Returns:
        (C, b, K) float32, differentiable.

    Raises:
        IndexError: A position is outside the table.
    """
    query, rows = query.float(), rows.float()
    maps = query.new_empty(*query.shape[:2], 0) if maps is None else maps.float()
    if index is None:
        chunks, candidates, dim = rows.shape
        rows = rows.reshape(-1, dim)
        index = torch.arange(chunks * candidates).view(chunks, candidates)
    inputs = (x.contiguous() for x in (query, maps, rows, index))
    return score(*inputs, kind)


def _score(query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, kind: str) -> Tensor:
    check_candidates(index, len(rows))
    scores = query.new_empty(*query.shape[:2], index.shape[1])
    _over_queries(kernels.score_blocks(kind), query, maps, rows, index, scores)
    return scores


def _query_gradients(
    query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    grad, grad_maps = torch.empty_like(query), torch.empty_like(maps)
    args = query, maps, rows, index, weights, grad, grad_maps
    _over_queries(kernels.accumulate_queries(kind), *args)
    return grad, grad_maps


def _row_gradients(
    query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: str
) -> Tensor:
    grad = torch.empty_like(rows)
    places, bounds = by_row(index.reshape(-1).numpy(), len(rows))
    args = *arrays(query, maps, rows), index.shape[1], places, bounds, *arrays(weights, grad)
    kernels.accumulate_rows(kind)(len(rows), weights.numel() * query.shape[2], *args)
    return grad


def _over_queries(kernel: BlockKernel, query: Tensor, maps: Tensor, *tensors: Tensor) -> None:
    """Run a kernel over blocks of queries; tensors: rows, index, and those of pairs."""
    index = tensors[1]
    blocks = len(index) * -(-query.shape[1] // kernels.QUERIES)
    kernel(blocks, query.numel() * index.shape[1], *arrays(query, maps, *tensors))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kind = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, scores = ctx.saved_tensors
    weights = grad.contiguous()
    if ctx.kind == "euclidean":  # 0 where rows are equal, as in torch.cdist
        weights = torch.where(scores > 0, weights / scores, 0)
    elif ctx.kind in ("scaled_squares", "hyperplane_squares"):
        weights = 2 * weights
    grad_query, grad_maps, grad_rows = None, None, None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        grad_query, grad_maps = query_gradients(*inputs, weights, ctx.kind)
    if ctx.needs_input_grad[2]:
        grad_rows = row_gradients(*inputs, weights, ctx.kind)
    return grad_query, grad_maps, grad_rows, None, None


score = operator(
    "pair_scores",
    _score,
    lambda query, maps, rows, index, kind: query.new_empty(*query.shape[:2], index.shape[1]),
    save=_save,
    backward=_backward,
)
query_gradients = operator(
    "pair_query_gradients",
    _query_gradients,
    lambda query, maps, *_: (torch.empty_like(query), torch.empty_like(maps)),
)
row_gradients = operator(
    "pair_row_gradients", _row_gradients, lambda query, maps, rows, *_: torch.empty_like(rows)
)
