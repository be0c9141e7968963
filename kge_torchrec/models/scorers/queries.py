"""Scorers that encode a query into one object and compare it with each candidate.

    QueryScorer      the contract: a query and its similarity to rows
    DotScorer        compares by inner product
    EuclideanScorer  compares by distance
    TrilinearScorer  a dot scorer that is linear in the relation as well

Shapes: C chunks, b queries per chunk, K candidates per chunk, U rows, D elements per entity row,
W elements per relation row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.models.distances import (
    aligned_products,
    compared_at,
    euclidean,
    euclidean_by_products,
    products,
)
from kge_torchrec.models.ops import pairwise, pick
from kge_torchrec.models.scorers.base import BIASES, Scorer, Side

_OTHER: dict[Side, Side] = {"tail": "head", "head": "tail"}
# Methods, and the fast paths that are valid only for their original implementation. A subclass that
# overrides such a method gets QueryScorer's version of the fast path back.
_ANSWERING = ("entity", "relation", "query", "encode_query", "drop_hidden", "similarity",
              "score_triples", "score_candidates", "score_contrast")  # fmt: skip
_SHORT_CUTS = dict.fromkeys(_ANSWERING, ("encodes_rows",)) | {
    "similarity_matrix": ("similarity_in_training", "similarity_at")
}


class QueryScorer(Scorer):
    """A scorer that encodes a query into one object and compares it with each candidate row.

    Subclasses implement ``query``, ``similarity`` and ``similarity_matrix``. All scoring methods
    derive from these, so they cannot disagree. A query is a tensor or a tuple of tensors with the
    leading shape of the anchors. Only the similarities read it, and ``picked`` if a part has
    another shape.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for given, faster in _SHORT_CUTS.items():
            for name in faster if given in vars(cls) else ():
                if name not in vars(cls):
                    setattr(cls, name, getattr(QueryScorer, name))

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

    @property
    def drops_pairs(self) -> bool:
        """Whether ``similarity_matrix`` draws dropout per (query, row) pair in training."""
        return False

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """Encode entity rows (..., D) and relation rows (..., W), which broadcast, into a query."""
        raise NotImplementedError

    def similarity(self, query: Any, rows: Tensor) -> Tensor:
        """Score each query with its own row: query (...), rows (..., D) -> (...)."""
        raise NotImplementedError

    def similarity_matrix(self, query: Any, rows: Tensor) -> Tensor:
        """Score all pairs of a chunk: query (C, b), rows (C, K, D) -> (C, b, K)."""
        raise NotImplementedError

    def similarity_in_training(self, query: Any, rows: Tensor) -> Tensor:
        """Return ``similarity_matrix`` for a loss, where the last digits do not matter.

        Some scorers compute it by a matrix product, which is faster but loses digits that ranking
        needs. A subclass that overrides ``similarity_matrix`` gets this default back.
        """
        return self.similarity_matrix(query, rows)

    def similarity_at(self, query: Any, rows: Tensor, index: Tensor) -> Tensor:
        """Score the rows that an index selects.

        A subclass that overrides ``similarity_matrix`` gets this default back.

        Args:
            query: (C, b) encoded queries.
            rows: (U, D) entity rows.
            index: (C, K) int64 positions in ``rows``.

        Returns:
            (C, b, K) scores.
        """
        return self.similarity_matrix(query, pick(rows, index))

    @property
    def picks_rows(self) -> bool:
        """Whether ``score_contrast_at`` avoids copying the selected rows for each chunk.

        False for subclasses that override how candidates are scored: ``score_contrast_at`` would
        bypass the override.
        """
        own = type(self)
        return (
            own.similarity_at is not QueryScorer.similarity_at
            and own.score_contrast is QueryScorer.score_contrast
            and own.score_candidates is QueryScorer.score_candidates
        )

    def encode_query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """Encode anchor rows (..., D) and relation ids (...) into a query."""
        relation, side = self.direct(relation, side)
        return self.query(self.input_dropout(self.entity(anchor)), self.relation(relation), side)

    def encodes_rows(self, rows: Tensor) -> bool:
        """Whether ``encode_rows`` supports these rows (U, D) and agrees with the other methods."""
        return False

    def encode_rows(
        self,
        rows: Tensor,
        ends: Mapping[Side, Tensor],
        relation: Tensor,
        candidates: Mapping[Side, Tensor],
        copied: Tensor,
    ) -> tuple[list[tuple[Any, Tensor, Tensor]], Tensor]:
        """Encode the queries and gather the candidates of a batch in one step.

        Args:
            rows: (U, D) entity rows of the batch.
            ends: Positions of heads and tails in ``rows``, (C b,) int64 each.
            relation: (C, b) int64 relation ids.
            candidates: Positions of the candidates of each side, (C, K) int64.
            copied: (P,) int64 distinct positions of rows to return as well.

        Returns:
            For each side of ``candidates`` the queries (C, b), the scores of their triples (C, b)
            and the candidate rows (C, K, D); and the rows at ``copied``, (P, D).
        """
        raise NotImplementedError

    def picked(self, query: Any, index: Tensor) -> Any:
        """Select queries: queries (1, b), positions (M,) int64 -> (1, M)."""
        return tree_map_only(Tensor, lambda part: part.index_select(1, index), query)

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
        positive = self.similarity(self.picked(encoded, query), self.entity(answer)[None])
        return positive[0], self.similarity_in_training(encoded, self.entity(candidates)[None])[0]

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

    def score_contrast(
        self, anchor: Tensor, relation: Tensor, target: Tensor, candidates: Tensor, side: Side
    ) -> tuple[Tensor, Tensor]:
        query = self.encode_query(anchor, relation, side)  # shared by both scores
        positive = self.similarity(query, self.entity(target))
        return positive, self.similarity_in_training(query, self.entity(candidates))

    def score_contrast_at(
        self,
        anchor: Tensor,
        relation: Tensor,
        target: Tensor,
        rows: Tensor,
        index: Tensor,
        side: Side,
    ) -> tuple[Tensor, Tensor]:
        """Return ``score_contrast`` with the rows that an index selects as candidates.

        Args:
            anchor: (C, b, D) entity rows.
            relation: (C, b) int64 relation ids.
            target: (C, b, D) entity rows of the answers.
            rows: (U, D) entity rows.
            index: (C, K) int64 positions of the candidates in ``rows``.
            side: The end that targets and candidates are.

        Returns:
            Scores of the triples (C, b) and of the candidates (C, b, K).
        """
        query = self.encode_query(anchor, relation, side)
        positive = self.similarity(query, self.entity(target))
        return positive, self.similarity_at(query, self.entity(rows), index)

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

    def encode_query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        return self.drop_hidden(super().encode_query(anchor, relation, side))

    def drop_hidden(self, query: Any) -> Any:
        """Apply hidden dropout to the query."""
        return self.hidden_dropout(query)

    def similarity(self, query: Any, rows: Tensor) -> Tensor:
        return (query * rows).sum(-1)

    def similarity_matrix(self, query: Any, rows: Tensor) -> Tensor:
        return products(query, rows)

    def similarity_in_training(self, query: Any, rows: Tensor) -> Tensor:
        return aligned_products(query, rows)

    def similarity_at(self, query: Any, rows: Tensor, index: Tensor) -> Tensor:
        return compared_at("dot", query, rows, index)


class EuclideanScorer(QueryScorer):
    """A query scorer whose query is a point; the score of a row is minus its Euclidean distance."""

    is_distance = True
    entity_metric = "euclidean"

    def similarity(self, query: Any, rows: Tensor) -> Tensor:
        return -torch.linalg.vector_norm(query - rows, dim=-1)

    def similarity_matrix(self, query: Any, rows: Tensor) -> Tensor:
        return -euclidean(query, rows)

    def similarity_in_training(self, query: Any, rows: Tensor) -> Tensor:
        return euclidean_by_products(query, rows)

    def similarity_at(self, query: Any, rows: Tensor, index: Tensor) -> Tensor:
        return -compared_at("euclidean", query, rows, index)


class TrilinearScorer(DotScorer):
    """A dot scorer that is linear in the relation as well: one product scores all relations.

    Subclasses also implement ``relation_query``, with score = <relation_query(head, tail),
    relation>.
    """

    is_bilinear = True

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
        rows, back = self.relation(relation, drop=False), _OTHER[side]
        anchor, answer = self.entity(anchor), self.entity(answer)
        return self.query(anchor, rows, side), answer, self.query(answer, rows, back), anchor

    def score_relations(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        anchor, target = self.input_dropout(self.entity(anchor)), self.entity(target)
        is_tail = self.reciprocal or side == "tail"
        head, tail = (anchor, target) if is_tail else (target, anchor)
        relations = self.relation(torch.arange(self.relation_rows, device=anchor.device))
        return torch.matmul(self.relation_query(head, tail), relations.t())
