"""The scorer contract that training, ranking and prediction share.

A scorer holds the relation (and any other dense) parameters; entity rows are handed in, so that
it never needs to know where they live.  A query is an anchor entity and a relation, asked for the
missing side: ``side="tail"`` asks (anchor, relation, ?), ``side="head"`` (?, relation, anchor).

Shapes: C chunks, b queries a chunk, K candidates a chunk, N entities, D numbers per entity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

Side = Literal["head", "tail"]
SIDES: tuple[Side, ...] = ("head", "tail")
Fill = Callable[[np.random.Generator, np.ndarray], object]  # draws into an array, in place


class Scorer(nn.Module):
    """Scores triples; a higher score means more plausible.

    With ``reciprocal`` every relation r has a twin r + num_relations, and the head query
    (?, r, t) is asked as the tail query (t, r + num_relations, ?) (Lacroix et al. 2018).
    """

    # Whether rows are read as complex numbers, which N3 then takes the modulus of.
    is_complex = False
    relation_is_complex = False

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False):
        super().__init__()
        self.num_relations, self.dim, self.reciprocal = num_relations, dim, reciprocal

    @property
    def relation_rows(self) -> int:
        """Rows that a relation table needs: twice the relations when reciprocal."""
        return self.num_relations * (2 if self.reciprocal else 1)

    def direct(self, relation: Tensor, side: Side) -> tuple[Tensor, Side]:
        """The relation rows and the side to score with, after the reciprocal twist if any."""
        if self.reciprocal and side == "head":
            return relation + self.num_relations, "tail"
        return relation, side

    def score_triples(
        self, anchor: Tensor, relation: Tensor, target: Tensor, side: Side = "tail"
    ) -> Tensor:
        """Scores of single triples.

        anchor, target: (..., D) rows; relation: (...) int64 ids.  With side "tail" the anchor is
        the head, with side "head" the tail.  Returns (...).
        """
        raise NotImplementedError

    def score_candidates(
        self, anchor: Tensor, relation: Tensor, candidates: Tensor, side: Side
    ) -> Tensor:
        """Scores of every query against the candidates of its chunk.

        anchor: (C, b, D); relation: (C, b); candidates: (C, K, D).  Returns (C, b, K).
        Candidates of each single query are C = queries, b = 1.
        """
        raise NotImplementedError

    def score_contrast(
        self, anchor: Tensor, relation: Tensor, target: Tensor, candidates: Tensor, side: Side
    ) -> tuple[Tensor, Tensor]:
        """``score_triples`` and ``score_candidates`` of the same queries, as a loss needs them.

        anchor, target: (C, b, D); relation: (C, b); candidates: (C, K, D).
        Returns (C, b) and (C, b, K).
        """
        return (
            self.score_triples(anchor, relation, target, side),
            self.score_candidates(anchor, relation, candidates, side),
        )

    def score_all(self, anchor: Tensor, relation: Tensor, rows: Tensor, side: Side) -> Tensor:
        """Scores against all rows given: (B, D), (B,), (N, D) -> (B, N)."""
        return self.score_candidates(anchor[None], relation[None], rows[None], side)[0]

    def relation_factors(self, relation: Tensor, side: Side) -> Tensor:
        """The relation rows that a query uses, for regularizers: (...) ids -> (..., D')."""
        relation, _ = self.direct(relation, side)
        return nn.functional.embedding(relation, self.relations)

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Gives every parameter its start from the stream; ``fill`` is the configured draw."""
        for parameter in self.parameters():
            fill(stream, parameter.numpy())


class QueryScorer(Scorer):
    """A scorer whose query folds into one vector, compared with each candidate row.

    Subclasses give ``query`` and ``similarity``; the three contract calls follow, so that they
    cannot disagree.
    """

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        """(..., D), (...) -> (..., D)"""
        raise NotImplementedError

    def similarity(self, query: Tensor, rows: Tensor) -> Tensor:
        """(..., D), (..., D) -> (...)"""
        raise NotImplementedError

    def similarity_matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        """(C, b, D), (C, K, D) -> (C, b, K)"""
        raise NotImplementedError

    def score_triples(
        self, anchor: Tensor, relation: Tensor, target: Tensor, side: Side = "tail"
    ) -> Tensor:
        relation, side = self.direct(relation, side)
        return self.similarity(self.query(anchor, relation, side), target)

    def score_candidates(
        self, anchor: Tensor, relation: Tensor, candidates: Tensor, side: Side
    ) -> Tensor:
        relation, side = self.direct(relation, side)
        return self.similarity_matrix(self.query(anchor, relation, side), candidates)

    def score_contrast(
        self, anchor: Tensor, relation: Tensor, target: Tensor, candidates: Tensor, side: Side
    ) -> tuple[Tensor, Tensor]:
        relation, side = self.direct(relation, side)
        query = self.query(anchor, relation, side)  # once for both
        return self.similarity(query, target), self.similarity_matrix(query, candidates)


class DotScorer(QueryScorer):
    """A query scorer that compares by inner product: one matrix product scores a whole chunk."""

    def similarity(self, query: Tensor, rows: Tensor) -> Tensor:
        return (query * rows).sum(-1)

    def similarity_matrix(self, query: Tensor, rows: Tensor) -> Tensor:
        return torch.matmul(query, rows.transpose(-1, -2))
