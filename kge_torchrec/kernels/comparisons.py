"""Comparisons of queries with rows, and the choice of their implementation.

In ranking the score of a pair does not depend on its position, so that ties stay ties. Only losses
take the matrix-product form of the Euclidean distance, which loses the digits of small distances.

Shapes: C chunks, b queries, K candidates, U rows, D elements (D/2 complex numbers) per row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from kge_torchrec.kernels.fused_distances import fused
from kge_torchrec.kernels.library import EPSILON, Distance, Mapped
from kge_torchrec.kernels.operators import IMPLEMENTATION, block_device, pairwise, pick

Index = Tensor | None
Side = Literal["head", "tail"]
Kind = Distance | Mapped | Literal["squares"]
_LINE = 16  # float32 values per cache line of 64 bytes
_FEW_PAIRS = 1 << 20  # smaller results stay in cache, where alignment does not matter


class Comparison:
    """How a scorer compares an encoded query with rows."""

    def pairs(self, query: Any, rows: Tensor) -> Tensor:
        """Score each query with its own row: query (...), rows (..., D) -> (...)."""
        raise NotImplementedError

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        """Score all pairs of a chunk.

        Args:
            query: (C, b) encoded queries.
            rows: (C, K, D), or (U, D) with an index.
            index: (C, K) int64 positions in ``rows``, or None.
            exact: Whether each pair needs the digits of ``pairs``; a loss does not.

        Returns:
            (C, b, K).
        """
        raise NotImplementedError


@dataclass(frozen=True)
class EachPair(Comparison):
    """A function of a query and a row, evaluated for every pair in blocks.

    Attributes:
        score: Maps the tensors of a query, and then a row, to a score; they broadcast:
            (..., D), (..., D) -> (...).
        shaped: Gives rows the shape that ``score`` takes, once for all blocks.
    """

    score: Callable[..., Tensor]
    shaped: Callable[[Tensor], Tensor] = lambda rows: rows

    def pairs(self, query: Any, rows: Tensor) -> Tensor:
        parts = [query] if isinstance(query, Tensor) else query
        return self.score(*parts, self.shaped(rows))

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        parts = [query] if isinstance(query, Tensor) else query
        rows = self.shaped(pick(rows, index))
        return pairwise(self.score, parts, [rows], sum(prod(x.shape[2:]) for x in parts))


class InnerProduct(Comparison):
    """<q, t>: one matrix product scores a whole chunk."""

    def pairs(self, query: Tensor, rows: Tensor) -> Tensor:
        return (query * rows).sum(-1)

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        if index is not None and IMPLEMENTATION["pairs"](query) == "numba":
            return _pair_scores("dot", query, rows, index)
        return products(query, pick(rows, index), aligned=not exact)


@dataclass(frozen=True)
class MinusDistance(Comparison):
    """Minus a distance; the query is a point, or (point, scale of the rows or None), (..., D) each.

    Without a scale "scaled_squares" is "squares".
    """

    kind: Kind

    def pairs(self, query: Any, rows: Tensor) -> Tensor:
        kind, parts = self._parts(query)
        return -FORMULAS[kind](*parts, rows)

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        kind, parts = self._parts(query)
        if kind in _BY_PRODUCTS and index is None and not exact:
            return _BY_PRODUCTS[kind](parts[0], rows)
        return -distance(kind, parts[0], rows, index, parts[1] if len(parts) > 1 else None)

    def _parts(self, query: Any) -> tuple[Kind, tuple[Tensor, ...]]:
        """Return the distance that a query measures, and its point and map if any."""
        if isinstance(query, Tensor):
            return self.kind, (query,)
        point, maps = query
        return ("squares", (point,)) if maps is None else (self.kind, (point, maps))


class OnHyperplane(Comparison):
    """Minus the squared distance on a hyperplane; the query is (point, normal w of length 1).

    With d the difference of point and row it is |d|^2 - <w, d>^2: two products score all pairs of a
    chunk. Where d is nearly parallel to w, two close numbers are subtracted, so exact scores are
    computed in float64.
    """

    def pairs(self, query: Any, rows: Tensor) -> Tensor:
        point, normal = query
        difference = point - rows
        projection = (difference * normal).sum(-1, keepdim=True)
        return -(difference - projection * normal).square().sum(-1)

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        if not exact:
            return self._scores(query, rows, index)
        query = [x.double() for x in query]
        return self._scores(query, pick(rows, index).double(), None).to(rows.dtype)

    def _scores(self, query: Any, rows: Tensor, index: Index) -> Tensor:
        point, normal = query
        of_rows = InnerProduct().matrix(normal, rows, index, exact=False)
        along = (point * normal).sum(-1, keepdim=True) - of_rows
        squares = MinusDistance("squares").matrix(point, rows, index, exact=False)
        # |d - <w, d> w|^2 also where rounding made the length of w differ from 1.
        return squares + (2 - normal.square().sum(-1, keepdim=True)) * along.square()


@dataclass(frozen=True)
class Shifted(Comparison):
    """Another comparison plus an offset; the query is (inner query, offset (..., 1))."""

    inner: Comparison

    def pairs(self, query: Any, rows: Tensor) -> Tensor:
        vector, offset = query
        return self.inner.pairs(vector, rows) + offset[..., 0]

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        vector, offset = query
        return self.inner.matrix(vector, rows, index, exact) + offset


@dataclass(frozen=True)
class WithBiases(Comparison):
    """Another comparison of the vectors of rows, plus the biases of anchor and answer.

    The last two elements of a row are its biases as a head and as a tail. The query is (inner
    query, the anchor's bias (..., 1), the side of the answers). If the inner comparison is an inner
    product, its query has two more elements: 1 for the bias that the answers use and 0 for the
    other. One product then scores vectors and biases.
    """

    inner: Comparison

    @property
    def adds_columns(self) -> bool:
        """Whether the query has two more elements, which multiply the answer's biases."""
        return isinstance(self.inner, InnerProduct)

    def query(self, inner: Any, biases: Tensor, side: Side) -> tuple[Any, Tensor, Side]:
        """Add the biases (..., 2) of the anchor to a query whose answers are on this side."""
        if self.adds_columns:
            ones = torch.ones_like(inner[..., :1])
            columns = (ones * 0, ones) if side == "tail" else (ones, ones * 0)
            inner = torch.cat([inner, *columns], -1)
        return inner, biases[..., :1] if side == "tail" else biases[..., 1:], side

    def split(self, rows: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        """Split rows of answers on this side into vectors and biases (..., 1)."""
        vector, as_head, as_tail = rows.split([rows.shape[-1] - 2, 1, 1], -1)
        return vector, as_tail if side == "tail" else as_head

    def pairs(self, query: Any, rows: Tensor) -> Tensor:
        inner, bias, side = query
        if self.adds_columns:
            return self.inner.pairs(inner, rows) + bias[..., 0]
        vector, own = self.split(rows, side)
        return self.inner.pairs(inner, vector) + (own + bias)[..., 0]

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        inner, bias, side = query
        if self.adds_columns:
            return self.inner.matrix(inner, rows, index, exact) + bias
        vector, own = self.split(rows, side)
        scores = self.inner.matrix(inner, vector, index, exact)
        return scores + bias + pick(own, index).transpose(-1, -2)


def distance(
    kind: Kind, query: Tensor, rows: Tensor, index: Index = None, maps: Tensor | None = None
) -> Tensor:
    """Compute the distances (C, b, K) of all pairs of a chunk; the kernels of a CPU copy no rows.

    Args:
        kind: The distance.
        query: (C, b, D).
        rows: (C, K, D), or (U, D) with an index.
        index: (C, K) int64 positions in ``rows``, or None.
        maps: (C, b, D) scales of the rows, for the kinds that have them.
    """
    if kind == "squares":
        return distance("euclidean", query, rows, index).square()
    implementation = IMPLEMENTATION["distances"](query)
    if implementation == "numba":
        return _pair_scores(kind, query, rows, index, maps)
    rows = pick(rows, index)
    if implementation == "inductor":
        return fused(kind, query, rows, maps)
    if implementation == "triton":
        from kge_torchrec.kernels.triton_pairs import distances  # needs Triton

        return distances(query, rows, maps, kind)
    if kind == "euclidean":
        return torch.cdist(query, rows, p=2.0, compute_mode="donot_use_mm_for_euclid_dist")
    if kind == "manhattan":
        return torch.cdist(query, rows, p=1.0)
    parts = [query] if maps is None else [query, maps]
    return pairwise(FORMULAS[kind], parts, [rows], query.shape[-1])


def _pair_scores(*args: Any) -> Tensor:
    from kge_torchrec.kernels.pair_scores import pair_scores  # numba loads slowly

    return pair_scores(*args)


def euclidean(query: Tensor, rows: Tensor) -> Tensor:
    """Compute Euclidean distances: (..., D), (..., D) -> (...)."""
    return torch.linalg.vector_norm(query - rows, dim=-1)


def _moduli(query: Tensor, rows: Tensor) -> Tensor:
    squares = (query - rows).unflatten(-1, (-1, 2)).square().sum(-1)
    return (squares + EPSILON).sqrt().sum(-1)  # the gradient of |x| is finite at x = 0


# The plain formulas, of tensors that broadcast: (point, row) or (point, map, row).
FORMULAS: dict[str, Callable[..., Tensor]] = {
    "euclidean": euclidean,
    "squares": lambda query, rows: (query - rows).square().sum(-1),
    "manhattan": lambda query, rows: torch.linalg.vector_norm(query - rows, ord=1, dim=-1),
    "moduli": _moduli,
    "scaled_manhattan": lambda query, scale, rows: (query - scale * rows).abs().sum(-1),
    "scaled_squares": lambda query, scale, rows: (query - scale * rows).square().sum(-1),
}


def products(query: Tensor, rows: Tensor, aligned: bool = False) -> Tensor:
    """Compute the inner products of all pairs of a chunk: (C, b, D), (C, K, D) -> (C, b, K).

    Rows (1, K, D) are those of all chunks. With ``aligned`` the bits of a pair may depend on its
    position, and the rows of a large result may begin at cache lines: on a CPU a float32 product
    takes up to twice as long otherwise.
    """
    if len(rows) == 1 != len(query):
        return products(query.reshape(1, -1, query.shape[-1]), rows, aligned).view(
            *query.shape[:2], rows.shape[1]
        )
    if not aligned and IMPLEMENTATION["products"](query) == "triton":
        from kge_torchrec.kernels.triton_pairs import products as tiled  # needs Triton

        return tiled(query, rows)
    if len(query) != 1:
        return torch.matmul(query, rows.transpose(-1, -2))
    is_uneven = rows.shape[1] % _LINE != 0 and query.shape[1] * rows.shape[1] >= _FEW_PAIRS
    is_float = query.dtype == rows.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if aligned and is_uneven and is_float and query.device.type == "cpu":
        return _AlignedProducts.apply(query[0], rows[0])[None]
    # Not as a batch of one, which would give the gradient of the rows a transposed layout.
    return torch.matmul(query, rows.squeeze(0).t())


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
        needs_query, needs_rows = ctx.needs_input_grad
        return grad @ rows if needs_query else None, grad.t() @ query if needs_rows else None


def squares_by_products(query: Tensor, rows: Tensor) -> Tensor:
    """Compute minus the squared distances, 2 <q, t> - |q|^2 - |t|^2, by one matrix product.

    Results that are small compared with the lengths lose digits and may have the wrong sign. The
    squared lengths are extra columns of the product, which adds them in float32 even where autocast
    or the CPU rounds the factors. Autocast to float16 is turned off, because its largest number is
    65,504.
    """
    query_lengths, row_lengths = _lengths(query), _lengths(rows)
    left = torch.cat([2 * query, -query_lengths, torch.ones_like(query_lengths)], -1)
    right = torch.cat([rows, torch.ones_like(row_lengths), -row_lengths], -1)
    device = block_device(rows)
    takes_half = torch.get_autocast_dtype(device) == torch.bfloat16
    with nullcontext() if takes_half else torch.autocast(device, enabled=False):
        return products(left, right, aligned=True)


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


_BY_PRODUCTS = {"euclidean": euclidean_by_products, "squares": squares_by_products}
