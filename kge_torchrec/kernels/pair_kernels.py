"""Kernels that score pairs of a query and a row, and keep nothing for each pair.

**Forward** four rows meet a query at a time, which is then read once for all of them.

**Backward** every query, and after that every row, pulls in the gradients of its pairs, four at a
time: from (weight, other end) of each pair into one sum, which stays in the nearest cache.  What a
pair gives is computed twice, but each sum has one writer: no gradient is ever held for a pair, and
any number of threads gives the same bits.  The pairs of a row are found by a counting sort.

A pair's score depends on its own numbers alone, wherever it stands: the last rows of a query are
filled up to four by repeating one, so that all go through the same instructions.

Each kind has kernels of its own, made from the helpers in ``pair_formulas``: a run compiles the
kinds that it uses and no other.

Shapes: C chunks, b queries per chunk, K candidates per chunk, U rows, D elements per row; M
elements per map, D or 0.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np

from kge_torchrec.kernels.blocks import BlockKernel, named_kernel
from kge_torchrec.kernels.jit import helper
from kge_torchrec.kernels.kinds import Compared, Mapped
from kge_torchrec.kernels.pair_formulas import FORMULAS

_MAPPED = get_args(Mapped)
QUERIES = 16  # that a thread takes at once: what they hold stays in the nearest cache
ROWS = 16  # few, for threads to end together: some rows have more pairs than others


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
            picked = index[c]
            for k in range(0, last + 1, 4):
                k1, k2, k3 = min(k + 1, last), min(k + 2, last), min(k + 3, last)
                x0, x1 = rows[picked[k]], rows[picked[k1]]
                x2, x3 = rows[picked[k2]], rows[picked[k3]]
                for i in range(first, min(first + QUERIES, count)):
                    if not is_mapped:
                        found = compare(query[c, i], x0, x1, x2, x3)
                    else:
                        found = compare(query[c, i], maps[c, i], x0, x1, x2, x3)
                    out = scores[c, i]
                    out[k], out[k1], out[k2], out[k3] = found

    return named_kernel(f"score_{kind}", score, 1)


@cache
def accumulate_queries(kind: Compared | Mapped) -> BlockKernel:
    """Return the kernel over the blocks of ``score_blocks``."""
    pull, is_mapped = FORMULAS[kind].pull_into_query, kind in _MAPPED

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
            picked, end = index[c], min(first + QUERIES, count)
            grad[c, first:end] = none
            grad_maps[c, first:end] = none
            for k in range(0, last + 1, 4):
                k1, k2, k3 = min(k + 1, last), min(k + 2, last), min(k + 3, last)
                x0, x1 = rows[picked[k]], rows[picked[k1]]
                x2, x3 = rows[picked[k2]], rows[picked[k3]]
                for i in range(first, end):
                    w = weights[c, i]
                    w0 = w[k]
                    w1 = w[k1] if k1 > k else none
                    w2 = w[k2] if k2 > k1 else none
                    w3 = w[k3] if k3 > k2 else none
                    q, total = query[c, i], grad[c, i]
                    if not is_mapped:
                        pull(w0, w1, w2, w3, q, x0, x1, x2, x3, total)
                    else:
                        m, total_m = maps[c, i], grad_maps[c, i]
                        pull(w0, w1, w2, w3, q, m, x0, x1, x2, x3, total, total_m)

    return named_kernel(f"accumulate_in_queries_{kind}", accumulate_in_queries, 1)


@cache
def accumulate_rows(kind: Compared | Mapped) -> BlockKernel:
    """Return the kernel over rows."""
    pull = FORMULAS[kind].pull_into_row
    pull_four = _pull_four_mapped if kind in _MAPPED else _pull_four

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
        # The pairs of a row that wait to be four: their queries' chunks and places, and weights.
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
                        pull_four(pull, chunk, place, weight, query, maps, rows[row], grad[row])
                        waiting = 0
            if waiting > 0:
                weight[waiting:] = np.float32(0)
                pull_four(pull, chunk, place, weight, query, maps, rows[row], grad[row])

    return named_kernel(f"accumulate_in_rows_{kind}", accumulate_in_rows, ROWS)


@helper
def _pull_four(
    pull: Any,
    chunk: np.ndarray,
    place: np.ndarray,
    weight: np.ndarray,
    query: np.ndarray,
    maps: np.ndarray,
    row: np.ndarray,
    total: np.ndarray,
) -> None:
    """Add to the gradient of a row (D,) what four waiting pairs give it."""
    q0, q1 = query[chunk[0], place[0]], query[chunk[1], place[1]]
    q2, q3 = query[chunk[2], place[2]], query[chunk[3], place[3]]
    w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
    pull(w0, w1, w2, w3, row, q0, q1, q2, q3, total)


@helper
def _pull_four_mapped(
    pull: Any,
    chunk: np.ndarray,
    place: np.ndarray,
    weight: np.ndarray,
    query: np.ndarray,
    maps: np.ndarray,
    row: np.ndarray,
    total: np.ndarray,
) -> None:
    """Add the same where queries have maps."""
    q0, q1 = query[chunk[0], place[0]], query[chunk[1], place[1]]
    q2, q3 = query[chunk[2], place[2]], query[chunk[3], place[3]]
    w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
    m0, m1 = maps[chunk[0], place[0]], maps[chunk[1], place[1]]
    m2, m3 = maps[chunk[2], place[2]], maps[chunk[3], place[3]]
    pull(w0, w1, w2, w3, row, q0, q1, q2, q3, m0, m1, m2, m3, total)
