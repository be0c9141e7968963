"""Scorers that encode a query into one object and compare it with each candidate.

    QueryScorer      the contract: a query and its similarity to rows
    DotScorer        compares by inner product
    EuclideanScorer  compares by distance
    TrilinearScorer  a dot scorer that is linear in the relation as well

Shapes: C chunks, b queries per chunk, K candidates per chunk, U rows, D elements per entity row,
W elements per relation row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.data import OTHER
from kge_torchrec.kernels.comparisons import (
    Comparison,
    InnerProduct,
    MinusDistance,
    comparison_of,
)
from kge_torchrec.kernels.operators import pairwise
from kge_torchrec.models.scorers.base import BIASES, Scorer, Side


class QueryScorer(Scorer):
    """A scorer that encodes a query into one object and compares it with each candidate row.

    Subclasses implement ``query``, ``similarity`` and ``similarity_matrix``. All scoring methods
    derive from these, so they cannot disagree. A query is a tensor or a tuple of tensors with the
    leading shape of the anchors. Only the similarities read it.

    Instead of the two similarities, a subclass may declare a ``comparison``. Training then uses the
    comparison's faster forms. A subclass that overrides one of the similarities cancels the
    declaration of its base class (``kernels.comparisons.comparison_of``).
    """

    comparison: Comparison

    @classmethod
    def check_biased(cls, dim: int, reciprocal: bool, options: Any) -> None:
        name = cls.name or cls.__name__
        if cls.bias_columns:
            raise ConfigError(f"model.biases: {name} has biases of its own; set it to false")
        if dim <= BIASES:
            raise ConfigError(
                f"model.dim must be at least {BIASES + 1} with model.biases true, which takes "
                f"{BIASES} of its numbers, got {dim}"
            )
        try:
            cls.check(dim - BIASES, reciprocal, options)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; model.biases true leaves {name} {dim - BIASES} of model.dim {dim}"
            ) from None

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """Encode entity rows (..., D) and relation rows (..., W), which broadcast, into a query."""
        raise NotImplementedError

    def similarity(self, query: Any, rows: Tensor) -> Tensor:
        """Score each query with its own row: query (...), rows (..., D) -> (...)."""
        return self.comparison.pairs(query, rows)

    def similarity_matrix(self, query: Any, rows: Tensor) -> Tensor:
        """Score all pairs of a chunk: query (C, b), rows (C, K, D) -> (C, b, K)."""
        return self.comparison.matrix(query, rows)

    def encode_query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """Encode anchor rows (..., D) and relation ids (...) into a query."""
        relation, side = self.direct(relation, side)
        anchor = self.input_dropout(self.entity(anchor))
        query = self.query(anchor, self.relation(relation), side)
        return self.drop_hidden(query) if self.hidden_dropout.p else query

    def drop_hidden(self, query: Any) -> Any:
        """Apply hidden dropout to the query.  Called if there is any."""
        return query

    def score_pairs(self, query: Any, rows: Tensor) -> Tensor:
        return comparison_of(self).pairs(query, self.entity(rows))

    def score_rows(self, query: Any, rows: Tensor, index: Tensor | None = None) -> Tensor:
        return comparison_of(self).matrix(query, self.entity(rows), index, exact=False)

    def score_answers(
        self,
        anchor: Tensor,
        relation: Tensor,
        answer: Tensor,
        query: Tensor,
        candidates: Tensor,
        side: Side,
    ) -> tuple[Tensor, Tensor]:
        """Score queries that have any number of answers; each query is encoded once.

        Args:
            anchor: (b, D) entity rows.
            relation: (b,) int64 relation ids.
            answer: (M, D) entity rows of all answers.
            query: (M,) int64, the query of each answer.
            candidates: (K, D) entity rows.
            side: The end that answers and candidates are.

        Returns:
            Scores of the answers (M,) and of the candidates (b, K).
        """
        encoded = self.encode_query(anchor[None], relation[None], side)
        of_answers = tree_map_only(Tensor, lambda part: part.index_select(1, query), encoded)
        positive = self.similarity(of_answers, self.entity(answer)[None])
        return positive[0], self.score_rows(encoded, candidates[None])[0]

    def score_triples(
        self, anchor: Tensor, relation: Tensor, target: Tensor, side: Side = "tail"
    ) -> Tensor:
        return self.similarity(self.encode_query(anchor, relation, side), self.entity(target))

    def score_candidates(
        self, anchor: Tensor, relation: Tensor, candidates: Tensor, side: Side
    ) -> Tensor:
        return self.similarity_matrix(
            self.encode_query(anchor, relation, side), self.entity(candidates)
        )

    def prepared(self, anchor: Tensor, relation: Tensor, side: Side) -> Callable[[Tensor], Tensor]:
        query = self.encode_query(anchor[None], relation[None], side)
        return lambda rows: self.similarity_matrix(query, self.entity(rows[None]))[0]

    def score_relations(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        side = "tail" if self.reciprocal else side
        anchors, targets = (self.entity(x).reshape(1, -1, self.dim) for x in (anchor, target))
        relations = self.relation(torch.arange(self.relation_rows, device=anchor.device))

        def score(anchor: Tensor, target: Tensor, relation: Tensor) -> Tensor:
            return self.similarity(self.query(anchor, relation, side), target)

        width = self.dim + self.relations.shape[1]
        anchors = self.input_dropout(anchors)
        scores = pairwise(score, [anchors, targets], [relations[None]], width)
        return scores.view(*anchor.shape[:-1], self.relation_rows)


class DotScorer(QueryScorer):
    """A query scorer that compares by inner product: one matrix product scores a whole chunk."""

    comparison: Comparison = InnerProduct()

    def drop_hidden(self, query: Any) -> Any:
        return self.hidden_dropout(query)


class EuclideanScorer(QueryScorer):
    """A query scorer whose query is a point; the score of a row is minus its Euclidean distance."""

    is_distance = True
    entity_metric = "euclidean"
    comparison: Comparison = MinusDistance("euclidean")


class TrilinearScorer(DotScorer):
    """A dot scorer that is linear in the relation as well: one product scores all relations.

    Subclasses also implement ``relation_query``, with score = <relation_query(head, tail),
    relation>.
    """

    is_bilinear = True
    # Elements per part of a row, whose length is multiplicative: |x y| = |x| |y|. None: the rows
    # have no such parts.
    part_size: int | None = None

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        """Combine two entities into a query for relations: (..., D), (..., D) -> (..., W)."""
        raise NotImplementedError

    def dual_vectors(
        self, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return two pairs of vectors whose inner products are each triple's score, no dropout.

        Args:
            anchor: (..., D) entity rows.
            relation: (...) int64 relation ids.
            answer: (..., D) entity rows.
            side: The end that the answer is.

        Returns:
            The query of the anchor, the answer, the query of the answer for the opposite side, and
            the anchor, (..., D) each. The inner product of the first pair and that of the second
            pair both equal the score.
        """
        relation, side = self.direct(relation, side)
        rows, back = self.relation(relation, drop=False), OTHER[side]
        anchor, answer = self.entity(anchor), self.entity(answer)
        return self.query(anchor, rows, side), answer, self.query(answer, rows, back), anchor

    def squared_parts(
        self, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> list[Tensor]:
        """Return the squared norms of the parts of the rows of triples, no dropout.

        Args:
            anchor: (..., D) entity rows.
            relation: (...) int64 relation ids.
            answer: (..., D) entity rows.
            side: The end that the answer is.

        Returns:
            (..., D / ``part_size``) of anchor, relation and answer.
        """
        relation, _ = self.direct(relation, side)
        rows = self.entity(anchor), self.relation(relation, drop=False), self.entity(answer)
        return [_squared_parts(x, self.part_size or 1) for x in rows]

    def score_relations(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        anchor, target = self.input_dropout(self.entity(anchor)), self.entity(target)
        is_tail = self.reciprocal or side == "tail"
        head, tail = (anchor, target) if is_tail else (target, anchor)
        relations = self.relation(torch.arange(self.relation_rows, device=anchor.device))
        return torch.matmul(self.relation_query(head, tail), relations.t())


def _squared_parts(rows: Tensor, size: int) -> Tensor:
    """Return the squared norms of the parts of rows: (..., D) -> (..., D / size)."""
    return sum(part.square() for part in rows.unflatten(-1, (-1, size)).unbind(-1))
