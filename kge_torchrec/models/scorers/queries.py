"""Scorers whose query is encoded into one thing, which is then compared with each candidate.

    QueryScorer      the contract by a query and its similarity to rows
    DotScorer        compares by inner product
    EuclideanScorer  compares by distance
    TrilinearScorer  a dot scorer that is linear in the relation as well

Shapes: C chunks, b queries a chunk, K candidates a chunk, U rows, D numbers per entity, W numbers a
relation.
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
# Calls, and what a class may compute faster by knowing how it answers them.  One that answers such
# a call anew gets QueryScorer's back.
_ANSWERING = ("entity", "relation", "query", "encode_query", "drop_hidden", "similarity",
              "score_triples", "score_candidates", "score_contrast")  # fmt: skip
_SHORT_CUTS = dict.fromkeys(_ANSWERING, ("encodes_rows",)) | {
    "similarity_matrix": ("similarity_in_training", "similarity_at")
}


class QueryScorer(Scorer):
    """A scorer whose query encodes into one thing, compared with each candidate row.

    Subclasses give ``query`` and the two similarities; the contract's calls follow, so that they
    cannot disagree.  A query is a tensor, or a tuple of tensors, with the leading shape of the
    anchors; only the similarities read it, and ``picked`` where a part has another shape.
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
        """Whether ``similarity_matrix`` draws in training, for each pair of a query and a row."""
        return False

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """Entity rows (..., D), relation rows (..., W), broadcast to each other -> query."""
        raise NotImplementedError

    def similarity(self, query: Any, rows: Tensor) -> Tensor:
        """query (...), rows (..., D) -> (...)"""
        raise NotImplementedError

    def similarity_matrix(self, query: Any, rows: Tensor) -> Tensor:
        """query (C, b), rows (C, K, D) -> (C, b, K)"""
        raise NotImplementedError

    def similarity_in_training(self, query: Any, rows: Tensor) -> Tensor:
        """``similarity_matrix`` where a loss is taken of what it returns.

        For scorers that a matrix product computes but for some digits, which ranking needs.  A
        class that gives another ``similarity_matrix`` gets this one back.
        """
        return self.similarity_matrix(query, rows)

    def similarity_at(self, query: Any, rows: Tensor, index: Tensor) -> Tensor:
        """query (C, b), the rows (U, D) that index (C, K) int64 picks -> (C, b, K)

        A class that gives another ``similarity_matrix`` gets this one back.
        """
        return self.similarity_matrix(query, pick(rows, index))

    @property
    def picks_rows(self) -> bool:
        """Whether ``score_contrast_at`` does without a copy of the rows for each chunk.

        Not of a class that scores candidates in a way of its own, which would be passed over.
        """
        own = type(self)
        return (
            own.similarity_at is not QueryScorer.similarity_at
            and own.score_contrast is QueryScorer.score_contrast
            and own.score_candidates is QueryScorer.score_candidates
        )

    def encode_query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """The query of anchor rows (..., D) and relation ids (...)."""
        relation, side = self.direct(relation, side)
        return self.query(self.input_dropout(self.entity(anchor)), self.relation(relation), side)

    def encodes_rows(self, rows: Tensor) -> bool:
        """Whether there is ``encode_rows`` for these (U, D), and it does as the other calls do."""
        return False

    def encode_rows(
        self,
        rows: Tensor,
        ends: Mapping[Side, Tensor],
        relation: Tensor,
        candidates: Mapping[Side, Tensor],
        copied: Tensor,
    ) -> tuple[list[tuple[Any, Tensor, Tensor]], Tensor]:
        """Queries for each side of ``candidates`` and what they are compared with, in one step.

        rows: (U, D), among which are the places of heads and tails, (C b,) int64 each, those of
        candidates, (C, K), and others, (P,), no place twice; relation: (C, b) ids.  Returns of each
        side the queries (C, b), the scores of their triples (C, b) and the candidates (C, K, D);
        and the rows at the other places, (P, D).
        """
        raise NotImplementedError

    def picked(self, query: Any, index: Tensor) -> Any:
        """Some of the queries (1, b), at the places (M,) int64: (1, M)."""
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
        """Scores of queries with any number of answers, each query being encoded once.

        anchor: (b, D); relation: (b,); answer: (M, D); query: (M,) which query each answer belongs
        to; candidates: (K, D).  Returns (M,) of the answers and (b, K).
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
        query = self.encode_query(anchor, relation, side)  # once for both
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
        """``score_contrast`` with the rows (U, D) that index (C, K) int64 picks as candidates."""
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
        """Hidden dropout of the query."""
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
    """A query scorer whose query is a point; a row scores minus its Euclidean distance."""

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

    Subclasses also give ``relation_query``, with score = <relation_query(head, tail), relation>.
    """

    is_bilinear = True

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        """(..., D), (..., D) -> (..., W)"""
        raise NotImplementedError

    def dual_vectors(
        self, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The query of the anchor, the answer; the query of the answer for the anchor, the anchor.

        anchor, answer: (..., D) rows; relation: (...) ids.  The inner product of either pair is the
        triple's score, but that nothing is dropped of rows.  Returns (..., D) each.
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
