"""The scorer contract, and everything that training, ranking and prediction derive from it.

A scorer encodes a query (``query``) and compares it with entity rows (``comparison``). A query is
an anchor entity and a relation. ``side`` names the missing end: "tail" is the query (anchor,
relation, ?), "head" is (?, relation, anchor). A chunk is a group of queries that share candidates.

With ``model.biases`` the last two elements of an entity row are its bias b as a head and its bias c
as a tail (Balazevic et al. 2019; KGEmb's ``--bias learn``, Chami et al. 2020): score(h, r, t) + b_h
+ c_t. The formula, normalization, dropout of queries and penalties do not see them.

Shapes: C chunks, b queries per chunk, K candidates per chunk, U entity rows, D elements per entity
vector, E elements per entity row (model.dim: D, and two biases if there are any), R relation rows
(inverses included), W elements per relation row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.data import SIDES as SIDES
from kge_torchrec.data import Side as Side
from kge_torchrec.kernels.comparisons import Comparison, WithBiases
from kge_torchrec.kernels.operators import lookup, pairwise
from kge_torchrec.models.scorers.layers import Dropout, Fill, init_layers, normalization_of

BIASES = 2  # elements per entity row that are biases: as a head, as a tail


class Scorer(nn.Module):
    """Scores triples; a higher score means more plausible.

    Subclasses declare a ``comparison`` and implement ``query``. They may also implement
    ``relation_query``, with which one product scores all relations.

    With ``reciprocal`` every relation r has an inverse r + num_relations, and the head query
    (?, r, t) is answered as the tail query (t, r + num_relations, ?) (Lacroix et al. 2018).

    Args:
        num_relations: Number of relations, without inverses.
        dim: D, elements per entity vector, without biases.
        reciprocal: Whether every relation has an inverse of its own.
        normalization: "none", "unit" (the formula uses entity rows at Euclidean length 1, the
            constraint of TransE) or "layer" (LayerNorm of entity rows and of relation rows).
        relation_dropout: Dropout probability for relation rows, in training mode.
        input_dropout: Dropout probability for the entity and relation rows of a query, in training
            mode.
        hidden_dropout: Dropout probability for the encoded query, in training mode. All dropout
            draws come from torch's generator; ``training`` documents their seeds.
        biases: Whether entity rows have two biases after their vectors.
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
    multiple = 1  # D must be a multiple of it
    relation_vectors: float = 1  # W / D
    is_distance = False  # the query is a point, so hidden dropout does not apply
    needs_reciprocal = False  # answers tail queries only
    is_complex = relation_is_complex = False  # complex rows: N3 uses moduli
    has_biases = False  # whether the formula has biases, also without model.biases
    # Whether the score is an inner product with a query that is linear in the anchor, on both
    # sides: <query(h, r, "tail"), t> = <query(t, r, "head"), h>.
    is_bilinear = False
    # "real" or "complex": a query is the product of anchor and relation, number by number, and for
    # heads with the conjugate. A kernel of CPUs may compute it then (``kernels.triple_products``).
    multiplies: str | None = None
    # Elements per part of a row, whose length is multiplicative: |x y| = |x| |y|. None: the rows
    # have no such parts.
    part_size: int | None = None

    comparison: Comparison  # of a query with entity vectors
    # ``relation_query(head, tail)`` combines two entity vectors (..., D) into a query for relations
    # (..., W): score(h, r, t) = <relation_query(h, t), r>. None: the score is not linear in r.
    relation_query: Any = None

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
        biases: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.options: Any = self.Options(**options)  # typed Any: each scorer has its own class
        self.check(dim, reciprocal, self.options)
        self.num_relations, self.dim, self.reciprocal = num_relations, dim, reciprocal
        self.has_biases = biases or self.has_biases
        self.bias_columns = BIASES if self.has_biases else 0
        self.zero_columns = BIASES if biases else 0  # trailing elements of a row that start at 0
        self.row_dim = dim + self.bias_columns
        if biases:
            self.formula = with_biases(self.formula)
        # A subclass may do anything else, so it does not inherit the attribute.
        self.multiplies = vars(type(self)).get("multiplies")
        width = self.relation_dim(dim, self.options)
        self.relation_rows = num_relations * (2 if reciprocal else 1)
        self.relations = nn.Parameter(torch.empty(self.relation_rows, width))
        self.entity_norm = normalization_of(normalization, dim)
        self.relation_norm = normalization_of("layer" if normalization == "layer" else "", width)
        self.relation_dropout = Dropout(relation_dropout)
        self.input_dropout = Dropout(input_dropout)
        self.hidden_dropout = Dropout(hidden_dropout)

    @classmethod
    def check(cls, dim: int, reciprocal: bool, options: Any) -> None:
        """Raise ConfigError, which names the key, unless these settings are valid."""
        name, count = cls.name or cls.__name__, cls.multiple_of(options)
        if dim % count:
            multiple = "even" if count == 2 else f"a multiple of {count}"
            given = "" if count == cls.multiple else " with these model.options"
            raise ConfigError(f"model.dim must be {multiple} for {name}{given}, got {dim}")
        if cls.needs_reciprocal and not reciprocal:
            raise ConfigError(
                f"model.reciprocal must be true for {name}: it answers tail queries only, and head "
                "queries are tail queries of the inverse relation"
            )

    @classmethod
    def check_row(cls, dim: int, reciprocal: bool, options: Any, biases: bool) -> None:
        """Do ``check`` for rows of E elements, the biases of model.biases included."""
        name = cls.name or cls.__name__
        if biases and cls.has_biases:
            raise ConfigError(f"model.biases: {name} has biases of its own; set it to false")
        of_biases = BIASES if biases or cls.has_biases else 0
        if dim <= of_biases:
            raise ConfigError(
                f"model.dim must be at least {BIASES + 1} for {name} with biases, which are "
                f"{BIASES} of its elements, got {dim}"
            )
        try:
            cls.check(dim - of_biases, reciprocal, options)
        except ConfigError as error:
            left = f"; the biases leave {name} {dim - BIASES} of model.dim {dim}"
            raise ConfigError(f"{error}{left if of_biases else ''}") from None

    # A class whose options decide overrides these three.

    @classmethod
    def multiple_of(cls, options: Any) -> int:
        return cls.multiple

    @classmethod
    def relation_dim(cls, dim: int, options: Any) -> int:
        """Return W, the elements per relation row."""
        return int(cls.relation_vectors * dim)

    @classmethod
    def measures_distance(cls, options: Any) -> bool:
        return cls.is_distance

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """Encode entity vectors (..., D) and relation rows (..., W), which broadcast, into a query.

        A query is a tensor, or a tuple that begins with one, with the leading shape of the anchors.
        Only ``comparison`` reads it.
        """
        raise NotImplementedError

    def query_of_ids(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """Encode entity vectors (..., D) and relation ids (...) into a query.

        A scorer overrides it whose relation rows are too large for a copy per query.
        """
        return self.query(anchor, self.relation(relation), side)

    def normalized(self, vectors: Tensor) -> Tensor:
        """Normalize entity vectors (..., D) as the formula expects them."""
        return self.entity_norm(vectors)

    def relation(self, ids: Tensor, drop: bool = True) -> Tensor:
        """Look up and normalize relation rows: (...) ids -> (..., W).

        Penalties use rows without dropout.
        """
        rows = self.relation_norm(lookup(self.relations, ids))
        return self.input_dropout(self.relation_dropout(rows)) if drop else rows

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize every parameter from a random stream. The caller disables gradients.

        ``fill`` draws relation rows as configured. Layers use torch's own distributions.
        """
        fill(stream, self.relations.numpy())
        init_layers(self, stream)

    # Everything below is derived. Subclasses leave it as it is.

    @property
    def row_comparison(self) -> Comparison:
        """``comparison``, plus the biases of both entities if rows have them."""
        return WithBiases(self.comparison) if self.has_biases else self.comparison

    @final
    def encode(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        """Encode anchor rows (..., E) and relation ids (...) into a query."""
        relation, side = self.direct(relation, side)
        vector, biases = self.split_biases(anchor)
        query = self.query_of_ids(self.input_dropout(self.normalized(vector)), relation, side)
        if self.hidden_dropout.p and not self.is_distance:  # to the query's first tensor
            if isinstance(query, Tensor):
                query = self.hidden_dropout(query)
            else:
                query = (self.hidden_dropout(query[0]), *query[1:])
        return query if biases is None else WithBiases(self.comparison).query(query, biases, side)

    @final
    def pairs(self, query: Any, rows: Tensor) -> Tensor:
        """Score each query with its own entity row: (...), (..., E) -> (...)."""
        return self.row_comparison.pairs(query, self.entity(rows))

    @final
    def matrix(
        self, query: Any, rows: Tensor, index: Tensor | None = None, exact: bool = True
    ) -> Tensor:
        """Score encoded queries (C, b) against the candidates of their chunk: (C, b, K).

        Args:
            query: (C, b) encoded queries.
            rows: (C, K, E) entity rows, or (U, E) with an index.
            index: (C, K) int64 positions of the candidates in ``rows``, or None.
            exact: Whether ranking needs all digits. A loss does not: some scorers compute its
                scores by a matrix product, which is faster but loses digits.
        """
        return self.row_comparison.matrix(query, self.entity(rows), index, exact)

    @final
    def score(
        self, anchor: Tensor, relation: Tensor, target: Tensor, side: Side = "tail"
    ) -> Tensor:
        """Score single triples: (..., E) rows, (...) relation ids, (..., E) rows -> (...).

        ``target`` is the end named by ``side``, and ``anchor`` the other one.
        """
        return self.pairs(self.encode(anchor, relation, side), target)

    @final
    def relation_scores(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        """Score every relation between two entities: (..., E), (..., E) -> (..., R).

        With reciprocal relations the columns are those of tail queries, inverses included, and the
        side is ignored: relation r of a head query is column r + num_relations.
        """
        side = "tail" if self.reciprocal else side
        x, anchor_biases = self.split_biases(anchor)
        y, target_biases = self.split_biases(target)
        x, y = self.normalized(x), self.normalized(y)
        ids = torch.arange(self.relation_rows, device=anchor.device)
        if self.relation_query is not None:
            x = self.input_dropout(x)
            head, tail = (x, y) if side == "tail" else (y, x)
            scores = torch.matmul(self.relation_query(head, tail), self.relation(ids).t())
        else:

            def score(anchor: Tensor, target: Tensor, relation: Tensor) -> Tensor:
                return self.comparison.pairs(self.query(anchor, relation, side), target)

            relations, width = self.relation(ids)[None], self.dim + self.relations.shape[1]
            vectors = [self.input_dropout(x.reshape(1, -1, self.dim)), y.reshape(1, -1, self.dim)]
            scores = pairwise(score, vectors, [relations], width)
            scores = scores.view(*anchor.shape[:-1], self.relation_rows)
        if anchor_biases is None or target_biases is None:
            return scores
        own, other = (0, 1) if side == "tail" else (1, 0)
        return scores + (anchor_biases[..., own, None] + target_biases[..., other, None])

    @final
    def entity(self, rows: Tensor) -> Tensor:
        """Normalize the vectors of entity rows (..., E) as the formula expects them."""
        vector, biases = self.split_biases(rows)
        taken = self.normalized(vector)
        if biases is None:
            return taken
        return rows if taken is vector else torch.cat([taken, biases], -1)

    @final
    def vectors(self, rows: Tensor) -> Tensor:
        """Return entity rows as the formula uses them, without biases: (..., E) -> (..., D)."""
        return self.normalized(self.split_biases(rows)[0])

    @final
    def direct(self, relation: Tensor, side: Side) -> tuple[Tensor, Side]:
        """Return the relation ids and the side to score with.

        With reciprocal relations a head query becomes a tail query of the inverse relation.
        """
        if self.reciprocal and side == "head":
            return relation + self.num_relations, "tail"
        return relation, side

    @final
    def split_biases(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split entity rows into vectors (..., D) and biases (..., 2), or None without biases."""
        if not self.has_biases:
            return rows, None
        vector, biases = rows.split([self.dim, BIASES], -1)
        return vector, biases


def with_biases(formula: str) -> str:
    """Add the biases to a scorer's formula text."""
    return f"{formula.removesuffix('.')}; plus b_h + c_t, the biases of head and tail."
