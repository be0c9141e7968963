"""Learned entity biases on top of any query scorer: ``model.biases``.

    score(h, r, t) + b_h + c_t

b is the bias of an entity as a head and c its bias as a tail, as in MuRE (Balazevic et al. 2019)
and in KGEmb's ``--bias learn`` (Chami et al. 2020). The biases are the last two elements of the
entity row, so they are sharded, optimized, saved and exported with the row.

Shapes: C chunks, b queries, K candidates, D elements per entity row, biases included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.models.ops import pick
from kge_torchrec.models.scorers.base import BIASES, Side
from kge_torchrec.models.scorers.layers import Fill
from kge_torchrec.models.scorers.queries import DotScorer, QueryScorer, TrilinearScorer


class BiasedQuery(NamedTuple):
    """The inner scorer's query, the anchor's bias and the side of the answers.

    If the inner scorer compares by inner product, its query has two more elements: 1 for the bias
    that the answers use and 0 for the other. One product then scores vectors and biases.
    """

    inner: Any
    bias: Tensor  # (..., 1)
    side: Side


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
        calls = "similarity", "similarity_matrix", "similarity_at"
        self._is_dot = all(getattr(type(inner), x) is getattr(DotScorer, x) for x in calls)

    @property
    def relations(self) -> Tensor:  # type: ignore[override]
        """The inner scorer's relation table."""
        return self.inner.relations

    @property
    def drops_pairs(self) -> bool:
        return self.inner.drops_pairs

    @property
    def picks_rows(self) -> bool:
        return self.inner.picks_rows

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        self.inner.reset_parameters(fill, stream)

    def entity(self, rows: Tensor) -> Tensor:
        vector, biases = self._split(rows)
        taken = self.inner.entity(vector)
        # Avoid a copy if the inner scorer returns its input.
        return rows if taken is vector else torch.cat([taken, biases], -1)

    def entity_factors(self, rows: Tensor) -> Tensor:
        return self.inner.entity_factors(self._split(rows)[0])

    def relation(self, ids: Tensor, drop: bool = True) -> Tensor:
        return self.inner.relation(ids, drop)

    @property
    def penalizes_relations(self) -> bool:
        return self.inner.penalizes_relations

    def relation_penalty(self, relation: Tensor, side: Side) -> Tensor:
        return self.inner.relation_penalty(relation, side)

    def relation_factors(self, relation: Tensor, side: Side) -> Tensor:
        return self.inner.relation_factors(relation, side)

    def encode_query(self, anchor: Tensor, relation: Tensor, side: Side) -> BiasedQuery:
        vector, biases = self._split(anchor)
        encoded = self.inner.encode_query(vector, relation, side)
        return self._query(encoded, biases, self.direct(relation, side)[1])

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> BiasedQuery:
        vector, biases = self._split(anchor)
        return self._query(self.inner.query(vector, relation, side), biases, side)

    def picked(self, query: BiasedQuery, index: Tensor) -> BiasedQuery:
        inner = self.inner.picked(query.inner, index)
        return BiasedQuery(inner, query.bias.index_select(1, index), query.side)

    def similarity(self, query: BiasedQuery, rows: Tensor) -> Tensor:
        if self._is_dot:
            return self.inner.similarity(query.inner, rows) + query.bias[..., 0]
        vector, biases = self._split(rows)
        own = _of_answer(biases, query.side) + query.bias
        return self.inner.similarity(query.inner, vector) + own[..., 0]

    def similarity_matrix(self, query: BiasedQuery, rows: Tensor) -> Tensor:
        return self._matrix(self.inner.similarity_matrix, query, rows)

    def similarity_in_training(self, query: BiasedQuery, rows: Tensor) -> Tensor:
        return self._matrix(self.inner.similarity_in_training, query, rows)

    def _matrix(
        self, compare: Callable[[Any, Tensor], Tensor], query: BiasedQuery, rows: Tensor
    ) -> Tensor:
        """Score all pairs of a chunk: (C, b), (C, K, D) -> (C, b, K).

        Args:
            compare: The inner scorer's function that compares its query with rows.
            query: (C, b) queries.
            rows: (C, K, D) entity rows.
        """
        if self._is_dot:
            return compare(query.inner, rows) + query.bias
        vector, biases = self._split(rows)
        own = _of_answer(biases, query.side).transpose(-1, -2)
        return compare(query.inner, vector) + query.bias + own

    def similarity_at(self, query: BiasedQuery, rows: Tensor, index: Tensor) -> Tensor:
        if self._is_dot:
            return self.inner.similarity_at(query.inner, rows, index) + query.bias
        vector, biases = self._split(rows)
        own = pick(_of_answer(biases, query.side), index).transpose(-1, -2)
        return self.inner.similarity_at(query.inner, vector, index) + query.bias + own

    def score_relations(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        side = "tail" if self.reciprocal else side
        (anchor, of_anchor), (target, of_target) = self._split(anchor), self._split(target)
        bias = _of_anchor(of_anchor, side) + _of_answer(of_target, side)
        return self.inner.score_relations(anchor, target, side) + bias

    def dual_vectors(
        self, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inner scorer's dual vectors; the inner scorer must be bilinear."""
        assert isinstance(self.inner, TrilinearScorer)
        anchor, answer = (self._split(rows)[0] for rows in (anchor, answer))
        return self.inner.dual_vectors(anchor, relation, answer, side)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split entity rows into vectors (..., D - 2) and head and tail biases (..., 2)."""
        vector, biases = rows.split([self.inner.dim, BIASES], -1)
        return vector, biases

    def _query(self, encoded: Any, biases: Tensor, side: Side) -> BiasedQuery:
        bias = _of_anchor(biases, side)
        if self._is_dot:
            one = torch.ones_like(encoded[..., :1])
            columns = (one * 0, one) if side == "tail" else (one, one * 0)
            encoded = torch.cat([encoded, *columns], -1)
        return BiasedQuery(encoded, bias, side)


def with_biases(formula: str) -> str:
    """Add the biases to a scorer's formula text."""
    return f"{formula.removesuffix('.')}; plus b_h + c_t, the biases of head and tail."


def _of_anchor(biases: Tensor, side: Side) -> Tensor:
    """Return the anchor's bias, for answers on this side: (..., 2) -> (..., 1)."""
    return biases[..., :1] if side == "tail" else biases[..., 1:]


def _of_answer(biases: Tensor, side: Side) -> Tensor:
    """Return the bias of an answer on this side: (..., 2) -> (..., 1)."""
    return biases[..., 1:] if side == "tail" else biases[..., :1]
