"""Learned entity biases on top of any query scorer: ``model.biases``.

    score(h, r, t) + b_h + c_t

b is the bias of an entity as a head and c its bias as a tail, as in MuRE (Balazevic et al. 2019)
and in KGEmb's ``--bias learn`` (Chami et al. 2020). The biases are the last two elements of the
entity row, so they are sharded, optimized, saved and exported with the row.

Shapes: C chunks, b queries, K candidates, D elements per entity row, biases included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.kernels.comparisons import Comparison, Index, InnerProduct, comparison_of
from kge_torchrec.kernels.operators import pick
from kge_torchrec.models.scorers.base import BIASES, Side
from kge_torchrec.models.scorers.layers import Fill
from kge_torchrec.models.scorers.queries import QueryScorer, TrilinearScorer


class BiasedQuery(NamedTuple):
    """The inner scorer's query, the anchor's bias and the side of the answers.

    If the inner scorer compares by inner product, its query has two more elements: 1 for the bias
    that the answers use and 0 for the other. One product then scores vectors and biases.
    """

    inner: Any
    bias: Tensor  # (..., 1)
    side: Side


@dataclass(frozen=True)
class WithBiases(Comparison):
    """Another comparison of the vectors, plus the biases of anchor and answer."""

    inner: Comparison

    @property
    def reads_in_place(self) -> bool:  # type: ignore[override]
        """Whether the inner comparison does."""
        return self.inner.reads_in_place

    @property
    def adds_columns(self) -> bool:
        """Whether the query has two more elements, which multiply the answer's biases."""
        return isinstance(self.inner, InnerProduct)

    def pairs(self, query: BiasedQuery, rows: Tensor) -> Tensor:
        if self.adds_columns:
            return self.inner.pairs(query.inner, rows) + query.bias[..., 0]
        vector, biases = split_biases(rows)
        total_bias = answer_bias(biases, query.side) + query.bias
        return self.inner.pairs(query.inner, vector) + total_bias[..., 0]

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        if self.adds_columns:
            return self.inner.matrix(query.inner, rows, index, exact) + query.bias
        vector, biases = split_biases(rows)
        own = answer_bias(biases, query.side)
        own = own if index is None else pick(own, index)
        scores = self.inner.matrix(query.inner, vector, index, exact)
        return scores + query.bias + own.transpose(-1, -2)


class Biased(QueryScorer):
    """A query scorer over D - 2 elements plus two biases per entity.

    With reciprocal relations every query is a tail query, so the anchor uses its head bias and the
    answer its tail bias. Biases are initialized to 0. Normalization, query dropout and regularizers
    skip them. All parameters belong to ``inner``.
    """

    bias_columns = zero_columns = BIASES

    def __init__(self, inner: QueryScorer):
        nn.Module.__init__(self)  # the inner scorer holds all parameters
        self.inner = inner
        self.num_relations, self.reciprocal = inner.num_relations, inner.reciprocal
        self.name, self.options = inner.name, inner.options
        self.dim = inner.dim + BIASES
        self.formula = with_biases(inner.formula)
        self.is_distance, self.needs_reciprocal = inner.is_distance, inner.needs_reciprocal
        self.is_complex, self.relation_is_complex = inner.is_complex, inner.relation_is_complex
        self.is_bilinear, self.entity_metric = inner.is_bilinear, inner.entity_metric
        self.relation_rows = inner.relation_rows

    @property
    def comparison(self) -> WithBiases:  # type: ignore[override]
        """The inner scorer's comparison plus both biases."""
        return WithBiases(comparison_of(self.inner))

    @property
    def relations(self) -> Tensor:  # type: ignore[override]
        """The inner scorer's relation table."""
        return self.inner.relations

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        self.inner.reset_parameters(fill, stream)

    def entity(self, rows: Tensor) -> Tensor:
        vector, biases = split_biases(rows)
        taken = self.inner.entity(vector)
        # Avoid a copy if the inner scorer returns its input.
        return rows if taken is vector else torch.cat([taken, biases], -1)

    def entity_factors(self, rows: Tensor) -> Tensor:
        return self.inner.entity_factors(split_biases(rows)[0])

    def relation(self, ids: Tensor, drop: bool = True) -> Tensor:
        return self.inner.relation(ids, drop)

    def relation_factors(self, relation: Tensor, side: Side) -> Tensor:
        return self.inner.relation_factors(relation, side)

    def encode_query(self, anchor: Tensor, relation: Tensor, side: Side) -> BiasedQuery:
        vector, biases = split_biases(anchor)
        encoded = self.inner.encode_query(vector, relation, side)
        return self._query(encoded, biases, self.direct(relation, side)[1])

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> BiasedQuery:
        vector, biases = split_biases(anchor)
        return self._query(self.inner.query(vector, relation, side), biases, side)

    def score_relations(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        side = "tail" if self.reciprocal else side
        anchor, anchor_biases = split_biases(anchor)
        target, target_biases = split_biases(target)
        bias = anchor_bias(anchor_biases, side) + answer_bias(target_biases, side)
        return self.inner.score_relations(anchor, target, side) + bias

    def dual_vectors(
        self, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inner scorer's dual vectors; the inner scorer must be bilinear."""
        assert isinstance(self.inner, TrilinearScorer)
        anchor, answer = (split_biases(rows)[0] for rows in (anchor, answer))
        return self.inner.dual_vectors(anchor, relation, answer, side)

    def squared_parts(
        self, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> list[Tensor]:
        """Return those of the inner scorer, which must be a ``TrilinearScorer``."""
        assert isinstance(self.inner, TrilinearScorer)
        anchor, answer = (split_biases(rows)[0] for rows in (anchor, answer))
        return self.inner.squared_parts(anchor, relation, answer, side)

    def _query(self, encoded: Any, biases: Tensor, side: Side) -> BiasedQuery:
        bias = anchor_bias(biases, side)
        if self.comparison.adds_columns:
            ones = torch.ones_like(encoded[..., :1])
            columns = (ones * 0, ones) if side == "tail" else (ones, ones * 0)
            encoded = torch.cat([encoded, *columns], -1)
        return BiasedQuery(encoded, bias, side)


def split_biases(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split entity rows into vectors (..., D - 2) and biases as head and as tail (..., 2)."""
    vector, biases = rows.split([rows.shape[-1] - BIASES, BIASES], -1)
    return vector, biases


def with_biases(formula: str) -> str:
    """Add the biases to a scorer's formula text."""
    return f"{formula.removesuffix('.')}; plus b_h + c_t, the biases of head and tail."


def anchor_bias(biases: Tensor, side: Side) -> Tensor:
    """Return the anchor's bias, for answers on this side: (..., 2) -> (..., 1)."""
    return biases[..., :1] if side == "tail" else biases[..., 1:]


def answer_bias(biases: Tensor, side: Side) -> Tensor:
    """Return the bias of an answer on this side: (..., 2) -> (..., 1)."""
    return biases[..., 1:] if side == "tail" else biases[..., :1]
