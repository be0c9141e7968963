"""Scores of pairs of a query and a row on a CPU: torch's operators over ``pair_kernels``.

    dot                 <q, x>
    manhattan           sum |q - x|
    euclidean           ||q - x||
    moduli              sum of |q - x| over complex numbers, which lie side by side as (re, im)

A query may have a second vector m, which maps rows before they are compared with it:

    scaled_manhattan    sum |q - m x|
    scaled_squares      ||q - m x||^2
    hyperplane_squares  ||d - m <m, d>||^2, d = q - x, the part of d on the hyperplane with normal m

A row is named by its place in a table, so that one which is a candidate of many queries is neither
copied for each of them nor given a gradient for each.

Shapes: C chunks, b queries a chunk, K candidates a chunk, U rows, D numbers a row; M numbers of a
map, D or 0 where rows are compared as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kge_torchrec.kernels import pair_kernels as kernels
from kge_torchrec.kernels.blocks import BlockKernel
from kge_torchrec.kernels.kinds import Comparison, Mapped
from kge_torchrec.kernels.row_sums import by_row


def pair_scores(
    kind: Comparison | Mapped,
    query: Tensor,
    rows: Tensor,
    index: Tensor | None = None,
    maps: Tensor | None = None,
) -> Tensor:
    """Every query compared with the candidates of its chunk: (C, b, K) float32.

    query: (C, b, D); rows: (U, D), of which index, (C, K) int64, picks the candidates; without it
    rows are (C, K, D).  maps: (C, b, D), the queries' second vectors where the kind has them.  Half
    precision is computed in float32.  D is even for "moduli"; the maps of "hyperplane_squares" have
    length 1, or 0.

    Raises IndexError where the index leaves the table.
    """
    query, rows = query.float(), rows.float()
    maps = query.new_empty(*query.shape[:2], 0) if maps is None else maps.float()
    if index is None:
        chunks, candidates, dim = rows.shape
        rows = rows.reshape(-1, dim)
        index = torch.arange(chunks * candidates).view(chunks, candidates)
    given = (x.contiguous() for x in (query, maps, rows, index))
    return _scores(*given, kind)


# torch.compile takes operators of torch's as they are.


@torch.library.custom_op("kge_torchrec::pair_scores", mutates_args=(), device_types="cpu")
def _scores(query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, kind: str) -> Tensor:
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(rows):
        raise IndexError(f"candidates {int(index.min())} to {int(index.max())} of {len(rows)} rows")
    scores = query.new_empty(*query.shape[:2], index.shape[1])
    _over_queries(kernels.score_blocks(kind), query, maps, rows, index, scores)
    return scores


@torch.library.custom_op("kge_torchrec::pair_queries", mutates_args=(), device_types="cpu")
def _gradients_of_queries(
    query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    grad, grad_maps = torch.empty_like(query), torch.empty_like(maps)
    given = query, maps, rows, index, weights, grad, grad_maps
    _over_queries(kernels.pull_into_queries(kind), *given)
    return grad, grad_maps


@torch.library.custom_op("kge_torchrec::pair_rows", mutates_args=(), device_types="cpu")
def _gradient_of_rows(
    query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: str
) -> Tensor:
    grad = torch.empty_like(rows)
    places, bounds = by_row(index.reshape(-1).numpy(), len(rows))
    given = *_arrays(query, maps, rows), index.shape[1], places, bounds, *_arrays(weights, grad)
    kernels.pull_into_rows(kind)(len(rows), weights.numel() * query.shape[2], *given)
    return grad


def _over_queries(
    kernel: BlockKernel,
    query: Tensor,
    maps: Tensor,
    rows: Tensor,
    index: Tensor,
    *of_pairs: Tensor,
) -> None:
    """Run a kernel over blocks of queries."""
    blocks = len(index) * -(-query.shape[1] // kernels.QUERIES)
    arguments = _arrays(query, maps, rows, index, *of_pairs)
    kernel(blocks, query.numel() * index.shape[1], *arguments)


def _arrays(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.detach().numpy() for tensor in tensors)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *given, ctx.kind = inputs
    ctx.save_for_backward(*given, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *given, scores = ctx.saved_tensors
    weights = grad.contiguous()
    if ctx.kind == "euclidean":  # 0 where rows are equal, as torch.cdist has it
        weights = torch.where(scores > 0, weights / scores, 0)
    elif ctx.kind in ("scaled_squares", "hyperplane_squares"):
        weights = 2 * weights
    of_query, of_maps, of_rows = None, None, None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        of_query, of_maps = _gradients_of_queries(*given, weights, ctx.kind)
    if ctx.needs_input_grad[2]:
        of_rows = _gradient_of_rows(*given, weights, ctx.kind)
    return of_query, of_maps, of_rows, None, None


_scores.register_autograd(_backward, setup_context=_keep)
_scores.register_fake(
    lambda query, maps, rows, index, kind: query.new_empty(*query.shape[:2], index.shape[1])
)
_gradients_of_queries.register_fake(
    lambda query, maps, *_: (torch.empty_like(query), torch.empty_like(maps))
)
_gradient_of_rows.register_fake(lambda query, maps, rows, *_: torch.empty_like(rows))
