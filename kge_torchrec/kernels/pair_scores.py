"""Scores of pairs of a query and a row on a CPU: the operators over ``pair_kernels``.

    dot                 <q, x>
    manhattan           sum |q - x|
    euclidean           ||q - x||
    moduli              sum of |q - x| over complex numbers, interleaved as (re, im)

A query may have a second vector m, which maps rows before they are compared with it:

    scaled_manhattan    sum |q - m x|
    scaled_squares      ||q - m x||^2

A row is given by its position in a table, so that a candidate of many queries is neither copied for
each of them nor given a gradient for each. No tensor per pair is materialized.

**Forward** compares a query with four rows at a time, so that the query is read once for all four.

**Backward** accumulates the gradient of every query, and after that of every row, from its pairs,
four at a time: the sum stays in the nearest cache. Each sum has one writer, so any number of
threads gives the same bits. The pairs of a row are found by a counting sort.

A pair's score depends on its own elements only, wherever it stands: the last rows of a query are
filled up to four by repeating one, so that all pairs go through the same instructions. Each kind
has kernels of its own, made from the helpers in ``pair_formulas``: a run compiles the kinds that it
uses and no other.

Brings: without it a step (1,024 triples, 128 negatives, 256 elements, one thread) takes 353 instead
of 35 ms for ComplEx with negatives of its own per triple, 94 instead of 27 for TransE, 992 instead
of 51 for RotatE, 373 instead of 39 for PairRE, 242 instead of 30 for MuRE.

Shapes: C chunks, b queries per chunk, K candidates per chunk, U rows, D elements per row; M
elements per map, D or 0 without maps.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.jit import helper
from kge_torchrec.kernels.library import Compared, Mapped, arrays, operator
from kge_torchrec.kernels.pair_formulas import FORMULAS
from kge_torchrec.kernels.parallel import BlockKernel, named_kernel
from kge_torchrec.kernels.rows import by_row, check_candidates


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
        maps: (C, b, D), the second vector of each query if the kind has one.

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
    _over_queries(score_blocks(kind), query, maps, rows, index, scores)
    return scores


def _query_gradients(
    query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    grad, grad_maps = torch.empty_like(query), torch.empty_like(maps)
    args = query, maps, rows, index, weights, grad, grad_maps
    _over_queries(accumulate_queries(kind), *args)
    return grad, grad_maps


def _row_gradients(
    query: Tensor, maps: Tensor, rows: Tensor, index: Tensor, weights: Tensor, kind: str
) -> Tensor:
    grad = torch.empty_like(rows)
    places, bounds = by_row(index.reshape(-1).numpy(), len(rows))
    args = *arrays(query, maps, rows), index.shape[1], places, bounds, *arrays(weights, grad)
    accumulate_rows(kind)(len(rows), weights.numel() * query.shape[2], *args)
    return grad


def _over_queries(kernel: BlockKernel, query: Tensor, maps: Tensor, *tensors: Tensor) -> None:
    """Run a kernel over blocks of queries; tensors: rows, index, and those of pairs."""
    index = tensors[1]
    blocks = len(index) * -(-query.shape[1] // QUERIES)
    kernel(blocks, query.numel() * index.shape[1], *arrays(query, maps, *tensors))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kind = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, scores = ctx.saved_tensors
    weights = grad.contiguous()
    if ctx.kind == "euclidean":  # 0 where rows are equal, as in torch.cdist
        weights = torch.where(scores > 0, weights / scores, 0)
    elif ctx.kind == "scaled_squares":
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


_MAPPED = get_args(Mapped)
QUERIES = 16  # queries per block of a thread: their rows stay in the nearest cache
ROWS = 16  # rows per block: few, so that threads end together, as some rows have more pairs


@cache
def score_blocks(kind: Compared | Mapped) -> BlockKernel:
    """Return the kernel over blocks of ``QUERIES`` queries, counted through all chunks."""
    compare, is_mapped = FORMULAS[kind].compare, kind in _MAPPED

    def score(
        start: int,
        stop: int,
        query: np.ndarray,
        maps: np.ndarray,
        rows: np.ndarray,
        index: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        count, last = query.shape[1], index.shape[1] - 1
        per_chunk = (count + QUERIES - 1) // QUERIES
        for block in range(start, stop):
            c, first = block // per_chunk, block % per_chunk * QUERIES
            candidates = index[c]
            for k in range(0, last + 1, 4):
                k1, k2, k3 = min(k + 1, last), min(k + 2, last), min(k + 3, last)
                x = (
                    rows[candidates[k]],
                    rows[candidates[k1]],
                    rows[candidates[k2]],
                    rows[candidates[k3]],
                )
                for i in range(first, min(first + QUERIES, count)):
                    if not is_mapped:
                        four = compare(query[c, i], x)
                    else:
                        four = compare(query[c, i], maps[c, i], x)
                    out = scores[c, i]
                    out[k], out[k1], out[k2], out[k3] = four

    return named_kernel(f"score_{kind}", score, 1)


@cache
def accumulate_queries(kind: Compared | Mapped) -> BlockKernel:
    """Return the kernel over the blocks of ``score_blocks``."""
    add, is_mapped = FORMULAS[kind].add_to_query, kind in _MAPPED

    def accumulate_in_queries(
        start: int,
        stop: int,
        query: np.ndarray,
        maps: np.ndarray,
        rows: np.ndarray,
        index: np.ndarray,
        weights: np.ndarray,
        grad: np.ndarray,
        grad_maps: np.ndarray,
    ) -> None:
        count, last, none = query.shape[1], index.shape[1] - 1, np.float32(0)
        per_chunk = (count + QUERIES - 1) // QUERIES
        for block in range(start, stop):
            c, first = block // per_chunk, block % per_chunk * QUERIES
            candidates, end = index[c], min(first + QUERIES, count)
            grad[c, first:end] = none
            grad_maps[c, first:end] = none
            for k in range(0, last + 1, 4):
                k1, k2, k3 = min(k + 1, last), min(k + 2, last), min(k + 3, last)
                x = (
                    rows[candidates[k]],
                    rows[candidates[k1]],
                    rows[candidates[k2]],
                    rows[candidates[k3]],
                )
                for i in range(first, end):
                    pairs = weights[c, i]
                    w1 = pairs[k1] if k1 > k else none
                    w2 = pairs[k2] if k2 > k1 else none
                    w3 = pairs[k3] if k3 > k2 else none
                    w = pairs[k], w1, w2, w3
                    q, total = query[c, i], grad[c, i]
                    if not is_mapped:
                        add(w, q, x, total)
                    else:
                        m, total_m = maps[c, i], grad_maps[c, i]
                        add(w, q, m, x, total, total_m)

    return named_kernel(f"accumulate_in_queries_{kind}", accumulate_in_queries, 1)


@cache
def accumulate_rows(kind: Compared | Mapped) -> BlockKernel:
    """Return the kernel over rows."""
    add = FORMULAS[kind].add_to_row
    add_four = _add_four_mapped if kind in _MAPPED else _add_four

    def accumulate_in_rows(
        start: int,
        stop: int,
        query: np.ndarray,
        maps: np.ndarray,
        rows: np.ndarray,
        candidates: int,
        places: np.ndarray,
        bounds: np.ndarray,
        weights: np.ndarray,
        grad: np.ndarray,
    ) -> None:
        # Up to four pairs of a row: the chunks and positions of their queries, and weights.
        chunk, place = np.zeros(4, np.int64), np.zeros(4, np.int64)
        weight = np.zeros(4, np.float32)
        for row in range(start, stop):
            waiting = 0
            grad[row] = np.float32(0)
            for at in range(bounds[row], bounds[row + 1]):
                c, k = places[at] // candidates, places[at] % candidates
                for i in range(query.shape[1]):
                    chunk[waiting], place[waiting], weight[waiting] = c, i, weights[c, i, k]
                    waiting += 1
                    if waiting == 4:
                        add_four(add, chunk, place, weight, query, maps, rows[row], grad[row])
                        waiting = 0
            if waiting > 0:
                weight[waiting:] = np.float32(0)
                add_four(add, chunk, place, weight, query, maps, rows[row], grad[row])

    return named_kernel(f"accumulate_in_rows_{kind}", accumulate_in_rows, ROWS)


@helper
def _add_four(
    add: Any,
    chunk: np.ndarray,
    place: np.ndarray,
    weight: np.ndarray,
    query: np.ndarray,
    maps: np.ndarray,
    row: np.ndarray,
    total: np.ndarray,
) -> None:
    """Add the terms of four waiting pairs to the gradient of a row (D,)."""
    w = weight[0], weight[1], weight[2], weight[3]
    add(w, row, _four(query, chunk, place), total)


@helper
def _add_four_mapped(
    add: Any,
    chunk: np.ndarray,
    place: np.ndarray,
    weight: np.ndarray,
    query: np.ndarray,
    maps: np.ndarray,
    row: np.ndarray,
    total: np.ndarray,
) -> None:
    """Add the terms of four waiting pairs whose queries have maps."""
    w = weight[0], weight[1], weight[2], weight[3]
    add(w, row, _four(query, chunk, place), _four(maps, chunk, place), total)


@helper
def _four(table: np.ndarray, chunk: np.ndarray, place: np.ndarray) -> Any:
    """Return the vectors of four waiting pairs: (C, b, D) -> four of (D,)."""
    first, second = table[chunk[0], place[0]], table[chunk[1], place[1]]
    return first, second, table[chunk[2], place[2]], table[chunk[3], place[3]]
