"""Queries of DistMult and ComplEx, and the scores of their triples, on a CPU, from rows in place.

A query is the product of an anchor and its relation number by number, q = a r, or of complex
numbers a r or a conj(r); the triple's score is <q, t>.  torch copies the rows of both ends, writes
each product to memory and does the same again in backward, a dozen passes over the whole batch.
Here anchors and targets are read among the batch's distinct rows, products stay in the nearest
cache, and a row's gradient is summed as it is made.

A row's gradient has one writer, and so has a relation's; each adds triples in their order, so that
any number of threads gives the same bits.

Shapes: U rows, Q queries of a side, K candidates of a side, D numbers a row, R relations.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.blocks import block_kernel
from kge_torchrec.kernels.jit import SUMS, helper, kernel
from kge_torchrec.kernels.kinds import Factor
from kge_torchrec.kernels.row_sums import by_row

_REAL, _COMPLEX, _CONJUGATE = range(3)  # places in Factor
_BLOCK = 16  # queries or rows that a thread takes at once


class Asked(NamedTuple):
    """The queries of one side; entities are places among the rows."""

    factor: Factor
    anchor: Tensor  # (Q,) int64
    relation: Tensor  # (Q,) int64, among the relations
    target: Tensor  # (Q,) int64
    candidates: Tensor  # (K,) int64


def encoded(
    rows: Tensor, relations: Tensor, sides: list[Asked], copied: Tensor
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
    """Of each side the queries (Q, D), the targets' scores (Q,), the candidates' rows (K, D).

    And the rows at the places ``copied`` (P,) int64, no place twice.  rows: (U, D); relations:
    (R, D); float32 all, and differentiable.  Raises IndexError where a place or a relation is none
    of them.
    """
    for _, *indices in sides:
        for name, index in zip(Asked._fields[1:], indices, strict=True):
            count = len(relations if name == "relation" else rows)
            if not _are_within(index.numpy(), count):
                numbers = f"{int(index.min())} to {int(index.max())}"
                raise IndexError(f"{name}: {numbers} are not all in [0, {count})")
    *found, copies = _Encoded.apply(rows, relations, sides, copied)
    return [tuple(found[3 * side : 3 * side + 3]) for side in range(len(sides))], copies


class _Encoded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, relations: Tensor, sides: list[Asked], copied: Tensor
    ) -> tuple[Any, ...]:
        ctx.save_for_backward(rows, relations, copied)
        ctx.sides = sides
        found: list[Tensor] = []
        for asked in sides:
            count = len(asked.anchor)
            query, score = rows.new_empty(count, rows.shape[1]), rows.new_empty(count)
            given = *_arrays(asked, rows, relations), query.numpy(), score.numpy()
            _multiply(count, query.numel(), *given)
            found += [query, score, rows.index_select(0, asked.candidates)]
        return *found, rows.index_select(0, copied)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, relations, copied = ctx.saved_tensors
        of_rows, of_relations = torch.empty(rows.shape), torch.empty(relations.shape)
        for side, asked in enumerate(ctx.sides):
            of_query, of_score, of_candidates = (
                grad.contiguous().numpy() for grad in grads[3 * side : 3 * side + 3]
            )
            adds = side > 0
            given = *_arrays(asked, rows, relations), of_query, of_score
            numbers = 2 * of_query.size

            index = torch.cat([asked.anchor, asked.target, asked.candidates])
            places = by_row(index.numpy(), len(rows))
            last = *given, of_candidates, *places, adds, of_rows.numpy()
            _pull_rows(len(rows), numbers, *last)

            places = by_row(asked.relation.numpy(), len(relations))
            last = *given, *places, adds, of_relations.numpy()
            _pull_relations(len(relations), numbers, *last)
        return of_rows.index_add_(0, copied, grads[-1]), of_relations, None, None


def _arrays(asked: Asked, rows: Tensor, relations: Tensor) -> tuple[Any, ...]:
    """What all kernels begin with."""
    places = (x.numpy() for x in (asked.anchor, asked.relation, asked.target))
    # Not by .numpy(), after which FSDP could not free the relations.
    given = rows.detach().numpy(), np.from_dlpack(relations.detach())
    return get_args(Factor).index(asked.factor), *places, *given


@kernel
def _are_within(index: np.ndarray, count: int) -> bool:
    outside = 0
    for number in index:
        outside += (number < 0) | (number >= count)
    return outside == 0


@block_kernel(_BLOCK)
def _multiply(
    start: int,
    stop: int,
    factor: int,
    anchor: np.ndarray,
    relation: np.ndarray,
    target: np.ndarray,
    rows: np.ndarray,
    relations: np.ndarray,
    query: np.ndarray,
    score: np.ndarray,
) -> None:
    for i in range(start, stop):
        _product(factor, rows[anchor[i]], relations[relation[i]], query[i])
        score[i] = _inner(query[i], rows[target[i]])


@block_kernel(_BLOCK)
def _pull_rows(
    start: int,
    stop: int,
    factor: int,
    anchor: np.ndarray,
    relation: np.ndarray,
    target: np.ndarray,
    rows: np.ndarray,
    relations: np.ndarray,
    of_query: np.ndarray,
    of_score: np.ndarray,
    of_candidates: np.ndarray,
    places: np.ndarray,
    bounds: np.ndarray,
    adds: bool,
    of_rows: np.ndarray,
) -> None:
    """Gradients of rows, of the places where they are anchors, targets and candidates in turn."""
    count = len(anchor)
    for row in range(start, stop):
        total = of_rows[row]
        if not adds:
            total[:] = np.float32(0)
        for place in places[bounds[row] : bounds[row + 1]]:
            if place >= 2 * count:
                _add(of_candidates[place - 2 * count], total)
                continue
            i = place % count
            numbers = relations[relation[i]]
            if place < count:
                _add_of_anchor(factor, of_query[i], of_score[i], rows[target[i]], numbers, total)
            else:
                _add_of_target(factor, of_score[i], rows[anchor[i]], numbers, total)


@block_kernel(_BLOCK)
def _pull_relations(
    start: int,
    stop: int,
    factor: int,
    anchor: np.ndarray,
    relation: np.ndarray,
    target: np.ndarray,
    rows: np.ndarray,
    relations: np.ndarray,
    of_query: np.ndarray,
    of_score: np.ndarray,
    places: np.ndarray,
    bounds: np.ndarray,
    adds: bool,
    of_relations: np.ndarray,
) -> None:
    for number in range(start, stop):
        total = of_relations[number]
        if not adds:
            total[:] = np.float32(0)
        for i in places[bounds[number] : bounds[number + 1]]:
            ends = rows[anchor[i]], rows[target[i]]
            _add_of_relation(factor, of_query[i], of_score[i], *ends, total)


@helper(fastmath=SUMS)
def _inner(x: np.ndarray, y: np.ndarray) -> np.float32:
    total = np.float32(0)
    for d in range(x.shape[0]):
        total += x[d] * y[d]
    return total


@helper
def _add(x: np.ndarray, total: np.ndarray) -> None:
    for d in range(x.shape[0]):
        total[d] += x[d]


@helper
def _product(factor: int, x: np.ndarray, by: np.ndarray, out: np.ndarray) -> None:
    if factor == _REAL:
        for d in range(x.shape[0]):
            out[d] = x[d] * by[d]
        return
    sign = np.float32(-1) if factor == _CONJUGATE else np.float32(1)
    for k in range(x.shape[0] // 2):
        real, imaginary = by[2 * k], sign * by[2 * k + 1]
        out[2 * k] = x[2 * k] * real - x[2 * k + 1] * imaginary
        out[2 * k + 1] = x[2 * k] * imaginary + x[2 * k + 1] * real


# A query's gradient is g, of its products with the candidates, and s t by its triple's score.


@helper
def _add_of_anchor(
    factor: int, g: np.ndarray, s: np.float32, t: np.ndarray, by: np.ndarray, total: np.ndarray
) -> None:
    """(g + s t) times r, or conj(r); of a conj(r) times r."""
    if factor == _REAL:
        for d in range(total.shape[0]):
            total[d] += (g[d] + s * t[d]) * by[d]
        return
    sign = np.float32(-1) if factor == _CONJUGATE else np.float32(1)
    for k in range(total.shape[0] // 2):
        x, y = g[2 * k] + s * t[2 * k], g[2 * k + 1] + s * t[2 * k + 1]
        real, imaginary = by[2 * k], sign * by[2 * k + 1]
        total[2 * k] += x * real + y * imaginary
        total[2 * k + 1] += y * real - x * imaginary


@helper
def _add_of_target(
    factor: int, s: np.float32, a: np.ndarray, by: np.ndarray, total: np.ndarray
) -> None:
    """Add s q to the total."""
    if factor == _REAL:
        for d in range(total.shape[0]):
            total[d] += s * (a[d] * by[d])
        return
    sign = np.float32(-1) if factor == _CONJUGATE else np.float32(1)
    for k in range(total.shape[0] // 2):
        real, imaginary = by[2 * k], sign * by[2 * k + 1]
        total[2 * k] += s * (a[2 * k] * real - a[2 * k + 1] * imaginary)
        total[2 * k + 1] += s * (a[2 * k] * imaginary + a[2 * k + 1] * real)


@helper
def _add_of_relation(
    factor: int, g: np.ndarray, s: np.float32, a: np.ndarray, t: np.ndarray, total: np.ndarray
) -> None:
    """(g + s t) times a, or conj(a); of a conj(r) its conjugate times a."""
    if factor == _REAL:
        for d in range(total.shape[0]):
            total[d] += (g[d] + s * t[d]) * a[d]
        return
    sign = np.float32(-1) if factor == _CONJUGATE else np.float32(1)
    for k in range(total.shape[0] // 2):
        x, y = g[2 * k] + s * t[2 * k], g[2 * k + 1] + s * t[2 * k + 1]
        total[2 * k] += x * a[2 * k] + y * a[2 * k + 1]
        total[2 * k + 1] += sign * (y * a[2 * k] - x * a[2 * k + 1])
