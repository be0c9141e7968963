"""The scorer contract that training, ranking and prediction use. Most scorers use ``queries``.

A scorer holds the relation parameters and any other dense parameters. The caller passes entity
rows in, so a scorer does not depend on where they are stored. A query is an anchor entity and a
relation. ``side`` names the missing end: "tail" is the query (anchor, relation, ?), "head" is
(?, relation, anchor). A chunk is a group of queries that share their candidates.

Shapes: C chunks, b queries per chunk, K candidates per chunk, N entities, D elements per entity
row (model.dim), R relation rows (inverses included), W elements per relation row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.data import SIDES as SIDES
from kge_torchrec.data import Side as Side
from kge_torchrec.kernels.operators import lookup, pick
from kge_torchrec.models.scorers.layers import Dropout, Fill, init_layers, normalization_of

# The reason why model.dim must be a multiple of the key, for the error message.
GROUPS = {
    2: "two real numbers make a complex one",
    4: "four real numbers make a quaternion",
    8: "eight real numbers make an octonion",
}
BIASES = 2  # elements per entity row that model.biases uses: bias as a head, bias as a tail


class Scorer(nn.Module):
    """Scores triples; a higher score means more plausible.

    With ``reciprocal`` every relation r has an inverse r + num_relations, and the head query
    (?, r, t) is answered as the tail query (t, r + num_relations, ?) (Lacroix et al. 2018).

    Args:
        num_relations: Number of relations, without inverses.
        dim: D, elements per entity row.
        reciprocal: Whether every relation has an inverse of its own.
        normalization: "none", "unit" (the formula uses entity rows at Euclidean length 1, the
            constraint of TransE) or "layer" (LayerNorm of entity rows and of relation rows).
        relation_dropout: Dropout probability for relation rows, in training mode.
        input_dropout: Dropout probability for the entity and relation rows of a query, in training
            mode.
        hidden_dropout: Dropout probability for the encoded query, in training mode. All dropout
            draws come from torch's generator; ``training`` documents their seeds.
        options: The fields of this scorer's ``Options``.

    Raises:
        ConfigError: dim, reciprocal and the options do not fit; the message names the config key.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of this scorer, typed and with defaults: ``model.options`` of the config.

        Subclasses replace this class. Their field descriptions are the help text.
        """

    name = ""  # config name
    formula = ""  # name, source and formula; exported models quote it
    start = ("normal", 1e-3)  # default distribution and scale of the initial rows
    is_distance = False  # the query is a point, so hidden dropout does not apply
    needs_reciprocal = False  # answers tail queries only
    is_complex = relation_is_complex = False  # complex rows: N3 uses moduli
    entity_metric: str | None = None  # between two entities, see answers/nearest.py
    # Trailing columns of an entity row that hold biases, not the vector.
    bias_columns = 0
    zero_columns = 0  # number of bias columns that are initialized to 0, not as the config says
    # Whether the score is an inner product with a query that is linear in the anchor, on both
    # sides; see ``TrilinearScorer.dual_vectors``.
    is_bilinear = False

    def __init__(
        self,
        num_relations: int,
        dim: int,
        reciprocal: bool = False,
        *,
        normalization: str = "none",
        relation_dropout: float = 0.0,
        input_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        **options: Any,
    ):
        super().__init__()
        self.options: Any = self.Options(**options)  # typed Any: each scorer has its own class
        self.check(dim, reciprocal, self.options)
        self.num_relations, self.dim, self.reciprocal = num_relations, dim, reciprocal
        width = self.relation_dim(dim, self.options)
        self.relation_rows = num_relations * (2 if reciprocal else 1)
        self.relations = nn.Parameter(torch.empty(self.relation_rows, width))
        self.entity_norm = normalization_of(normalization, dim - self.bias_columns)
        relation_normalization = "layer" if normalization == "layer" else "none"
        self.relation_norm = normalization_of(relation_normalization, width)
        self.relation_dropout = Dropout(relation_dropout)
        self.input_dropout = Dropout(input_dropout)
        self.hidden_dropout = Dropout(hidden_dropout)

    @classmethod
    def check(cls, dim: int, reciprocal: bool, options: Any) -> None:
        """Raise ConfigError, which names the key, unless these settings are valid."""
        name = cls.name or cls.__name__
        count, because = cls.multiple(options)
        if dim % count:
            multiple = "even" if count == 2 else f"a multiple of {count}"
            raise ConfigError(f"model.dim must be {multiple} for {name} ({because}), got {dim}")
        if cls.needs_reciprocal and not reciprocal:
            raise ConfigError(
                f"model.reciprocal must be true for {name}: it answers tail queries only, and head "
                "queries are tail queries of the inverse relation"
            )

    @classmethod
    def check_biased(cls, dim: int, reciprocal: bool, options: Any) -> None:
        """Raise ConfigError, which names the key, unless ``Biased`` can wrap this scorer.

        Args:
            dim: Elements per entity row, including the two biases.
            reciprocal: Whether relations have inverses.
            options: The scorer's ``Options``.
        """
        raise ConfigError(
            f"model.biases: {cls.name or cls.__name__} does not encode queries, to whose scores "
            "biases could be added; derive it from QueryScorer, or set model.biases false"
        )

    @classmethod
    def multiple(cls, options: Any) -> tuple[int, str]:
        """Return the divisor that D must be a multiple of, and the reason for the error message."""
        return 1, ""

    @classmethod
    def measures_distance(cls, options: Any) -> bool:
        """Return ``is_distance`` for these options."""
        return cls.is_distance

    @classmethod
    def relation_dim(cls, dim: int, options: Any) -> int:
        """Return W, the elements per relation row. The default is D."""
        return dim

    def direct(self, relation: Tensor, side: Side) -> tuple[Tensor, Side]:
        """Return the relation ids and the side to score with.

        With reciprocal relations a head query becomes a tail query of the inverse relation.
        """
        if self.reciprocal and side == "head":
            return relation + self.num_relations, "tail"
        return relation, side

    def entity(self, rows: Tensor) -> Tensor:
        """Normalize entity rows as the formula expects them: (..., D) -> (..., D)."""
        if not self.bias_columns or isinstance(self.entity_norm, nn.Identity):
            return self.entity_norm(rows)
        vector, biases = rows.split([self.dim - self.bias_columns, self.bias_columns], -1)
        return torch.cat([self.entity_norm(vector), biases], -1)

    def relation(self, ids: Tensor, drop: bool = True) -> Tensor:
        """Look up and normalize relation rows: (...) ids -> (..., W).

        Args:
            ids: (...) int64 relation ids.
            drop: Whether to apply dropout in training mode. Penalties use rows without dropout.
        """
        rows = self.relation_norm(lookup(self.relations, ids))
        return self.input_dropout(self.relation_dropout(rows)) if drop else rows

    def entity_factors(self, rows: Tensor) -> Tensor:
        """Return the part of stored (unnormalized) entity rows that regularizers penalize."""
        return rows

    def score_triples(
        self, anchor: Tensor, relation: Tensor, target: Tensor, side: Side = "tail"
    ) -> Tensor:
        """Score single triples.

        Args:
            anchor: (..., D) entity rows: heads if side is "tail", tails if side is "head".
            relation: (...) int64 relation ids.
            target: (..., D) entity rows of the other end.
            side: The end that ``target`` is.

        Returns:
            (...) scores.
        """
        raise NotImplementedError

    def score_candidates(
        self, anchor: Tensor, relation: Tensor, candidates: Tensor, side: Side
    ) -> Tensor:
        """Score every query against the candidates of its chunk.

        Args:
            anchor: (C, b, D) entity rows.
            relation: (C, b) int64 relation ids.
            candidates: (C, K, D) entity rows. For separate candidates per query, pass b = 1 and one
                chunk per query.
            side: The end that the candidates are.

        Returns:
            (C, b, K) scores.
        """
        raise NotImplementedError

    def encode_query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """Encode anchor rows (..., D) and relation ids (...) into a query.

        The default keeps all three: a scorer of whole triples encodes nothing.
        """
        return anchor, relation, side

    def score_pairs(self, query: Any, rows: Tensor) -> Tensor:
        """Score each encoded query with its own entity row: (...), (..., D) -> (...)."""
        anchor, relation, side = query
        return self.score_triples(anchor, relation, rows, side)

    def score_rows(self, query: Any, rows: Tensor, index: Tensor | None = None) -> Tensor:
        """Score encoded queries against the candidates of their chunk, for a loss.

        Some scorers compute these scores by a matrix product, which is faster but loses digits that
        ranking needs.

        Args:
            query: (C, b) encoded queries.
            rows: (C, K, D) entity rows, or (U, D) with an index.
            index: (C, K) int64 positions of the candidates in ``rows``, or None.

        Returns:
            (C, b, K) scores.
        """
        anchor, relation, side = query
        candidates = rows if index is None else pick(rows, index)
        return self.score_candidates(anchor, relation, candidates, side)

    def score_contrast(
        self, anchor: Tensor, relation: Tensor, target: Tensor, candidates: Tensor, side: Side
    ) -> tuple[Tensor, Tensor]:
        """Score triples and candidates for a loss; each query is encoded once.

        Args:
            anchor: (C, b, D) entity rows.
            relation: (C, b) int64 relation ids.
            target: (C, b, D) entity rows of the answers.
            candidates: (C, K, D) entity rows.
            side: The end that targets and candidates are.

        Returns:
            Scores of the triples (C, b) and of the candidates (C, b, K).
        """
        query = self.encode_query(anchor, relation, side)
        return self.score_pairs(query, target), self.score_rows(query, candidates)

    def score_all(self, anchor: Tensor, relation: Tensor, rows: Tensor, side: Side) -> Tensor:
        """Score queries against all the rows passed in: (B, D), (B,), (N, D) -> (B, N)."""
        return self.score_candidates(anchor[None], relation[None], rows[None], side)[0]

    def prepared(self, anchor: Tensor, relation: Tensor, side: Side) -> Callable[[Tensor], Tensor]:
        """Return a function that maps a block of rows to ``score_all`` of these queries.

        Work that does not depend on the rows is done once.

        Args:
            anchor: (B, D) entity rows.
            relation: (B,) int64 relation ids.
            side: The end that the rows are.
        """
        return lambda rows: self.score_all(anchor, relation, rows, side)

    def score_relations(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        """Score every relation between two entities: (..., D), (..., D) -> (..., R).

        With reciprocal relations the columns are those of tail queries, inverses included, and the
        side is ignored: relation r of a head query is column r + num_relations.
        """
        raise NotImplementedError

    def relation_factors(self, relation: Tensor, side: Side) -> Tensor:
        """Return the stored relation rows of queries, for regularizers: (...) ids -> (..., W)."""
        relation, _ = self.direct(relation, side)
        return lookup(self.relations, relation)

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize every parameter from a random stream.

        Args:
            fill: The configured distribution, for relation rows. Layers use torch's own
                distributions.
            stream: The random stream.
        """
        fill(stream, self.relations.numpy())
        init_layers(self, stream)
