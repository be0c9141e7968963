"""Learnt biases of entities, on top of any query scorer: what ``model.biases`` asks for.

    score(h, r, t) + b_h + c_t

b is the bias of an entity as a head, c as a tail, as in MuRE (Balazevic et al. 2019) and in KGEmb's
``--bias learn`` (Chami et al. 2020).  They are the last two numbers of the entity's row, so that
they are sharded, stepped, saved and exported as all others are.

Shapes: C chunks, b queries, K candidates, D numbers a row, biases included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.models.ops import pick
from kge_torchrec.models.scorers.base import BIASES, Fill, Side
from kge_torchrec.models.scorers.queries import DotScorer, QueryScorer, TrilinearScorer


class BiasedQuery(NamedTuple):
    """What the inner scorer compares, the bias of the anchor, and the side of the answers.

    An inner query that is compared by inner product has two numbers more, 1 for the bias of answers
    and 0 for the other: one product then scores vectors and biases.
    """

    inner: Any
    bias: Tensor  # (..., 1)
    side: Side


class Biased(QueryScorer):
    """A query scorer of D - 2 numbers, and the two biases of an entity.

    With reciprocal relations the anchor of any query counts as a head, the answer as a tail, as
    the queries are asked.  Biases start at 0; normalization, dropout of queries and regularizers
    leave them out.  Its parameters are those of ``inner``.
    """

    bias_columns = zero_columns = BIASES

    def __init__(self, inner: QueryScorer):
        nn.Module.__init__(self)  # everything else is the inner scorer's
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
        """The inner scorer's."""
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
        # What nothing was done to is not copied.
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
        """(C, b), (C, K, D) -> (C, b, K), by what compares the inner query with the rows."""
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
        """The inner scorer's, where it is bilinear."""
        assert isinstance(self.inner, TrilinearScorer)
        anchor, answer = (self._split(rows)[0] for rows in (anchor, answer))
        return self.inner.dual_vectors(anchor, relation, answer, side)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The inner scorer's rows (..., D - 2), biases as a head and as a tail (..., 2)."""
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
    """A scorer's formula in words, with biases."""
    return f"{formula.removesuffix('.')}; plus b_h + c_t, the biases of head and tail."


def _of_anchor(biases: Tensor, side: Side) -> Tensor:
    """(..., 2) -> (..., 1): the bias of an entity that is asked with, for answers of a side."""
    return biases[..., :1] if side == "tail" else biases[..., 1:]


def _of_answer(biases: Tensor, side: Side) -> Tensor:
    """(..., 2) -> (..., 1): the bias of an entity as an answer on that side."""
    return biases[..., 1:] if side == "tail" else biases[..., :1]
