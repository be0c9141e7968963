"""The scorer of recommender systems: an operator per relation, then a comparison of two vectors.

    score(h, r, t) = compare(S_r h, D_r t) / temperature

    identity, dot             matrix factorization, Koren et al. 2009     <h, t>
    identity, cosine          two towers, Yi et al. 2019                  cos(h, t) / temperature
    translation, dot          TwHIN, El-Kishky et al. 2022                <h + r, t>
    any operator, ends both   GiGL's knowledge graph embedding (Snap)     compare(S_r h, D_r t)

Shapes: D elements per entity row, W elements per relation row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kge_torchrec.config.checks import ConfigError, one_of, positive
from kge_torchrec.kernels.comparisons import (
    Comparison,
    Index,
    InnerProduct,
    MappedPoint,
    MinusDistance,
    Shifted,
    ShiftedQuery,
    euclidean,
)
from kge_torchrec.kernels.operators import pairwise, pick, times
from kge_torchrec.models.scorers.base import GROUPS, Side
from kge_torchrec.models.scorers.bilinear import bilinear_query
from kge_torchrec.models.scorers.layers import Fill
from kge_torchrec.models.scorers.queries import DotScorer

OPERATORS = ("identity", "translation", "diagonal", "complex", "linear")
COMPARATORS = ("dot", "cosine", "l2")
ENDS = ("head", "tail", "both")


def applied(operator: str, rows: Tensor, relation: Tensor) -> Tensor:
    """Apply a relation's operator to entity rows: (..., D), (..., W) -> (..., D)."""
    if operator == "identity":  # an empty sum: only the shapes broadcast
        return rows + relation.sum(-1, keepdim=True)
    if operator == "translation":
        return rows + relation
    if operator == "diagonal":
        return rows * relation
    if operator == "complex":
        return times(rows, relation)
    return bilinear_query(rows, _matrix(relation, rows), "tail")


def transposed(operator: str, query: Tensor, relation: Tensor) -> Tensor:
    """Return q' with <q, operator(x)> = <q', x> + a constant: (..., D), (..., W) -> (..., D)."""
    if operator == "translation":  # the constant is <q, relation>
        return query
    if operator == "diagonal":
        return query * relation
    if operator == "complex":
        return times(query, relation, conjugate=True)
    return bilinear_query(query, _matrix(relation, query), "head")


def _matrix(relation: Tensor, rows: Tensor) -> Tensor:
    return relation.unflatten(-1, (rows.shape[-1], rows.shape[-1]))


@dataclass(frozen=True)
class OperatedRows(Comparison):
    """The cosine or minus the distance of a point and rows under the operator of the query.

    The query is a ``MappedPoint`` whose map is the relation row of that operator, or None. Without
    an operator all pairs of a cosine are one matrix product. With one, each pair is computed by
    itself, in blocks.
    """

    operator: str
    comparator: str
    temperature: float

    @property
    def reads_in_place(self) -> bool:  # type: ignore[override]
        """Whether ``matrix`` avoids copying the rows that an index selects."""
        return self.operator in ("identity", "translation")

    def pairs(self, query: MappedPoint, rows: Tensor) -> Tensor:
        return self._scores(*query, rows)

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        point, relation = query
        if relation is not None:
            rows = rows if index is None else pick(rows, index)
            width = rows.shape[-1] + relation.shape[-1]
            return pairwise(self._scores, [point, relation], [rows], width)
        if self.comparator == "cosine":
            point = normalize(point, dim=-1) / self.temperature
            return InnerProduct().matrix(point, normalize(rows, dim=-1), index, exact)
        return MinusDistance("euclidean").matrix(point, rows, index, exact) / self.temperature

    def _scores(self, point: Tensor, relation: Tensor | None, rows: Tensor) -> Tensor:
        if relation is not None:
            rows = applied(self.operator, rows, relation)
        if self.comparator == "cosine":
            point = normalize(point, dim=-1) / self.temperature
            return (point * normalize(rows, dim=-1)).sum(-1)
        return -euclidean(point, rows) / self.temperature


class Operator(DotScorer):
    """Applies a relation's operator to the head, the tail or both, and compares the two vectors.

    A relation row holds the parameters of the head's operator, then those of the tail's: none for
    identity, D for translation, diagonal and complex, D x D for linear. Operators start near the
    identity. With model.reciprocal every query is a tail query, so "head" is the entity of the
    query. Raises ConfigError when D is odd for complex, or when identity has ends.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the operator scorer.

        Args:
            operator: identity, translation, diagonal, complex or linear.
            comparator: dot (inner product), cosine, or l2 (minus the Euclidean distance).
            ends: End that the operator acts on: head, tail, or both, with parameters of their own.
            temperature: Divides the score, before negatives.log_q corrects it.
        """

        operator: str = "identity"
        comparator: str = "dot"
        ends: str = "head"
        temperature: float = 1.0

        def __post_init__(self) -> None:
            one_of("model.options.operator", self.operator, OPERATORS)
            one_of("model.options.comparator", self.comparator, COMPARATORS)
            one_of("model.options.ends", self.ends, ENDS)
            positive("model.options.temperature", self.temperature)
            if self.operator == "identity" and self.ends != "head":
                raise ConfigError(
                    f"model.options.ends: {self.ends} has no effect with operator identity; leave "
                    "it out, or set another model.options.operator"
                )

    name = "operator"
    start = ("normal", 0.1)
    formula = (
        "Operators (El-Kishky et al. 2022): score(h, r, t) = compare(S_r h, D_r t) / temperature."
    )

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, **shared)
        options = self.options
        self.is_distance = self.measures_distance(options)
        self.is_complex = self.relation_is_complex = options.operator == "complex"
        self.comparison = OperatedRows(options.operator, options.comparator, options.temperature)
        if options.comparator == "dot":
            self.comparison = Shifted(InnerProduct()) if self._has_offsets else InnerProduct()

    @classmethod
    def multiple(cls, options: Options) -> tuple[int, str]:
        return (2, GROUPS[2]) if options.operator == "complex" else (1, "")

    @classmethod
    def relation_dim(cls, dim: int, options: Options) -> int:
        width = {"identity": 0, "linear": dim * dim}.get(options.operator, dim)
        return 2 * width if options.ends == "both" else width

    @classmethod
    def measures_distance(cls, options: Options) -> bool:
        return options.comparator == "l2"

    @property
    def _has_offsets(self) -> bool:
        """Whether a translation of the answers adds a constant to the scores of a query."""
        on_answers = self.options.ends != "head" or not self.reciprocal
        return self.options.operator == "translation" and on_answers

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize operators to the identity plus values as configured."""
        super().reset_parameters(fill, stream)
        operator, dim = self.options.operator, self.dim
        if operator == "diagonal":
            self.relations += 1
        elif operator == "complex":
            self.relations[:, ::2] += 1
        elif operator == "linear":
            self.relations.view(-1, dim, dim).add_(torch.eye(dim))

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        options = self.options
        own, other = self._operators(relation, side)
        point = anchor if own is None else applied(options.operator, anchor, own)
        if options.comparator == "l2" and options.operator == "translation" and other is not None:
            point, other = point - other, None
        if options.comparator != "dot":
            return MappedPoint(point, other)
        point = point / options.temperature
        vector = point if other is None else transposed(options.operator, point, other)
        if not self._has_offsets:
            return vector
        offset = torch.zeros_like(point) if other is None else point * other
        return ShiftedQuery(vector, offset.sum(-1, keepdim=True))

    def _operators(self, relation: Tensor, side: Side) -> tuple[Tensor | None, Tensor | None]:
        """Return the parameters of the operators on the anchor and on the answers."""
        if self.options.operator == "identity":
            return relation, None
        ends: tuple[Tensor | None, Tensor | None] = relation, None
        if self.options.ends == "both":
            head, tail = relation.chunk(2, -1)
            ends = head, tail
        elif self.options.ends == "tail":
            ends = None, relation
        return ends if side == "tail" else ends[::-1]

    def drop_hidden(self, query: Any) -> Any:
        if isinstance(query, Tensor):
            return self.hidden_dropout(query)
        return query._replace(**{query._fields[0]: self.hidden_dropout(query[0])})
