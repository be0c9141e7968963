"""The scorer contract that training, ranking and prediction share; most keep it as ``queries`` do.

A scorer holds the relation (and any other dense) parameters; entity rows are handed in, so that
it never needs to know where they live.  A query is an anchor entity and a relation, asked for the
missing side: ``side="tail"`` asks (anchor, relation, ?), ``side="head"`` (?, relation, anchor).

Shapes: C chunks, b queries a chunk, K candidates a chunk, N entities, D numbers per entity, R
relation rows (inverses included), W numbers a relation.
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
from kge_torchrec.models.ops import Dropout, lookup
from kge_torchrec.models.scorers.layers import Fill, init_layers, normalization_of

# What so many real numbers make, in the message for a model.dim that is no multiple of them.
GROUPS = {
    2: "two real numbers make a complex one",
    4: "four real numbers make a quaternion",
    8: "eight real numbers make an octonion",
}
BIASES = 2  # numbers of an entity that model.biases makes its biases, as a head and as a tail


class Scorer(nn.Module):
    """Scores triples; a higher score means more plausible.

    With ``reciprocal`` every relation r has an inverse r + num_relations, and the head query
    (?, r, t) is asked as the tail query (t, r + num_relations, ?) (Lacroix et al. 2018).

    normalization: none, unit (entity rows of Euclidean length 1, the constraint of TransE, as part
    of the formula) or layer (a LayerNorm of entity rows, one of relation rows).
    relation_dropout: of a relation row; input_dropout: of a query's entity and relation row;
    hidden_dropout: of the encoded query; in training mode only.  The draws come from torch's
    generator: what they are a function of is said in ``training``.

    options: those of ``Options``, the settings that this scorer has besides.

    Raises ConfigError, which names the key of the config, when dim, reciprocal and the options do
    not fit.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of this scorer alone, typed and with defaults: ``model.options`` of the config.

        Subclasses put their own in its place; what it says of its fields is their help text.
        """

    name = ""  # in the config
    formula = ""  # after its name and source; exported models say it
    start = ("normal", 1e-3)  # distribution and scale of the rows that it learns well from
    is_distance = False  # its query is a point: nothing to apply hidden dropout to
    needs_reciprocal = False  # answers tail queries only
    is_complex = relation_is_complex = False  # rows are complex numbers: N3 takes their moduli
    entity_metric: str | None = None  # of two entities, see answers/nearest.py
    # Columns at the end of an entity's row that are no part of its vector.
    bias_columns = 0
    zero_columns = 0  # of those, how many start at 0 whatever the config draws
    # Whether the score is an inner product with a query that is linear in its anchor, for either
    # side: see ``TrilinearScorer.dual_vectors``.
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
        self.options: Any = self.Options(**options)  # each scorer has its own
        self.check(dim, reciprocal, self.options)
        self.num_relations, self.dim, self.reciprocal = num_relations, dim, reciprocal
        width = self.relation_dim(dim, self.options)
        self.relations = nn.Parameter(torch.empty(self.relation_rows, width))
        self.entity_norm = normalization_of(normalization, dim - self.bias_columns)
        of_relations = "layer" if normalization == "layer" else "none"
        self.relation_norm = normalization_of(of_relations, width)
        self.relation_dropout = Dropout(relation_dropout)
        self.input_dropout = Dropout(input_dropout)
        self.hidden_dropout = Dropout(hidden_dropout)

    @classmethod
    def check(cls, dim: int, reciprocal: bool, options: Any) -> None:
        """Raises ConfigError, which names the key, unless the scorer can be made like this."""
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
        """Raises ConfigError, which names the key, unless ``biased`` can be put around it.

        dim: all numbers of an entity, its biases included.
        """
        raise ConfigError(
            f"model.biases: {cls.name or cls.__name__} does not encode queries, to whose scores "
            "biases could be added; derive it from QueryScorer, or set model.biases false"
        )

    @classmethod
    def multiple(cls, options: Any) -> tuple[int, str]:
        """The number that D must be a multiple of, and why."""
        return 1, ""

    @classmethod
    def relation_dim(cls, dim: int, options: Any) -> int:
        """W, the numbers per relation; D if a scorer does not say otherwise."""
        return dim

    @property
    def relation_rows(self) -> int:
        """R, the rows that a relation table needs: twice the relations when reciprocal."""
        return self.num_relations * (2 if self.reciprocal else 1)

    def direct(self, relation: Tensor, side: Side) -> tuple[Tensor, Side]:
        """The relation rows and the side to score with, after the reciprocal twist if any."""
        if self.reciprocal and side == "head":
            return relation + self.num_relations, "tail"
        return relation, side

    def entity(self, rows: Tensor) -> Tensor:
        """Entity rows as the formula takes them: normalised.  (..., D) -> (..., D)"""
        if not self.bias_columns or isinstance(self.entity_norm, nn.Identity):
            return self.entity_norm(rows)
        vector, biases = rows.split([self.dim - self.bias_columns, self.bias_columns], -1)
        return torch.cat([self.entity_norm(vector), biases], -1)

    def relation(self, ids: Tensor, drop: bool = True) -> Tensor:
        """Relation rows as the formula takes them: (...) ids -> (..., W).

        drop: with dropout, in training; penalties are taken without.
        """
        rows = self.relation_norm(lookup(self.relations, ids))
        return self.input_dropout(self.relation_dropout(rows)) if drop else rows

    @property
    def penalizes_relations(self) -> bool:
        """Whether there is a ``relation_penalty``."""
        return False

    def relation_penalty(self, relation: Tensor, side: Side) -> Tensor:
        """A penalty of the scorer's own on the relation of each query, weighted.

        relation: (...) ids.  Returns (...), which is added to the losses of the queries.
        """
        raise NotImplementedError

    def entity_factors(self, rows: Tensor) -> Tensor:
        """The part of entity rows that regularizers see, as it lies in the table."""
        return rows

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

    def prepared(self, anchor: Tensor, relation: Tensor, side: Side) -> Callable[[Tensor], Tensor]:
        """``score_all`` of these queries as a function of the rows, for one block after another.

        anchor: (B, D); relation: (B,).  What does not depend on the rows is computed once.
        """
        return lambda rows: self.score_all(anchor, relation, rows, side)

    def score_relations(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        """Scores of every relation between two entities: (..., D), (..., D) -> (..., R).

        With reciprocal relations the columns are those of tail queries, inverses included, and the
        side plays no part: relation r of a head query is column r + num_relations.
        """
        raise NotImplementedError

    def relation_factors(self, relation: Tensor, side: Side) -> Tensor:
        """The relation rows that a query uses, for regularizers: (...) ids -> (..., W)."""
        relation, _ = self.direct(relation, side)
        return lookup(self.relations, relation)

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Gives every parameter its start from the stream.

        ``fill`` is the configured draw, for relation rows; layers start as torch's own do.
        """
        fill(stream, self.relations.numpy())
        init_layers(self, stream)
