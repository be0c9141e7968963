"""The scorer of recommender systems: an operator per relation, then a comparison of two vectors.

    score(h, r, t) = compare(S_r h, D_r t) / temperature

    identity, dot             matrix factorization, Koren et al. 2009     <h, t>
    identity, cosine          two towers, Yi et al. 2019                  cos(h, t) / temperature
    translation, dot          TwHIN, El-Kishky et al. 2022                <h + r, t>
    an operator on each end   GiGL's knowledge graph embedding (Snap)     compare(S_r h, D_r t)

Shapes: D elements per entity row, W elements per relation row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kge_torchrec.config.checks import PositiveFloat
from kge_torchrec.kernels.comparisons import (
    Comparison,
    Index,
    InnerProduct,
    MinusDistance,
    Shifted,
    euclidean,
)
from kge_torchrec.kernels.operators import pairwise, pick, times
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.models.scorers.bilinear import bilinear_query
from kge_torchrec.models.scorers.layers import Fill

Operation = Literal["identity", "translation", "diagonal", "complex", "linear"]


def widths(options: Operator.Options, dim: int) -> tuple[int, int]:
    """Return the elements per relation row of the head's and of the tail's operator.

    Two identities have one element, which no score depends on: FSDP cannot shard a table of none.
    """
    own = {"identity": 0, "linear": dim * dim}
    head, tail = (own.get(operator, dim) for operator in (options.head, options.tail))
    return head or int(not tail), tail


def applied(operator: str, rows: Tensor, relation: Tensor) -> Tensor:
    """Apply a relation's operator to entity rows: (..., D), (..., W) -> (..., D)."""
    if operator == "identity":  # only the shapes broadcast
        return rows + 0 * relation.sum(-1, keepdim=True)
    if operator == "translation":
        return rows + relation
    if operator == "diagonal":
        return rows * relation
    if operator == "complex":
        return times(rows, relation)
    return bilinear_query(rows, _matrix(relation, rows), "tail")


def transposed(operator: str, query: Tensor, relation: Tensor) -> Tensor:
    """Return q' with <q, operator(x)> = <q', x> + a constant: (..., D), (..., W) -> (..., D)."""
    if operator in ("identity", "translation"):  # of a translation it is <q, relation>
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
    """The cosine or minus the distance of a point and rows under an operator, over a temperature.

    The query is (point, the operator's parameters or None for the identity, the operator's name).
    Without an operator all pairs of a cosine are one matrix product. With one, each pair is
    computed by itself, in blocks.
    """

    comparator: str
    temperature: float
    operates_on_tails: bool = False

    def pairs(self, query: Any, rows: Tensor) -> Tensor:
        point, relation, operator = query
        return self._scores(operator, point, relation, rows)

    def matrix(self, query: Any, rows: Tensor, index: Index = None, exact: bool = True) -> Tensor:
        point, relation, operator = query
        if relation is not None:
            rows = pick(rows, index)
            width = rows.shape[-1] + relation.shape[-1]
            return pairwise(partial(self._scores, operator), [point, relation], [rows], width)
        if self.comparator == "cosine":
            point = normalize(point, dim=-1) / self.temperature
            return InnerProduct().matrix(point, normalize(rows, dim=-1), index, exact)
        return MinusDistance("euclidean").matrix(point, rows, index, exact) / self.temperature

    def vectors(self, points: Tensor, is_query: bool) -> Tensor:
        """Return vectors (..., D) whose inner product, or minus their distance, is the score."""
        if self.comparator == "cosine":
            points = normalize(points, dim=-1)
        return points / self.temperature if is_query or self.comparator == "l2" else points

    def _scores(
        self, operator: str, point: Tensor, relation: Tensor | None, rows: Tensor
    ) -> Tensor:
        if relation is not None:
            rows = applied(operator, rows, relation)
        if self.comparator == "cosine":
            point = normalize(point, dim=-1) / self.temperature
            return (point * normalize(rows, dim=-1)).sum(-1)
        return -euclidean(point, rows) / self.temperature


class Operator(Scorer):
    """Applies an operator of the relation to the head, another to the tail, and compares them.

    A relation row holds the parameters of the head's operator, then those of the tail's: none for
    identity (but one in all), D for translation, diagonal and complex, D x D for linear. Operators
    start near the identity. With model.reciprocal every query is a tail query, so the entity of the
    query counts as the head.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the operator scorer."""

        head: Operation = "identity"
        """Operator on heads: identity, translation, diagonal, complex or linear."""
        tail: Operation = "identity"
        """Operator on tails, with parameters of its own."""
        comparator: Literal["dot", "cosine", "l2"] = "dot"
        """dot (inner product), cosine, or l2 (minus the Euclidean distance)."""
        temperature: PositiveFloat = 1.0
        """Divides the score, before negatives.log_q corrects it."""

    name = "operator"
    start = ("normal", 0.1)
    formula = (
        "Operator (El-Kishky et al. 2022): score(h, r, t) = compare(S_r h, D_r t) / temperature."
    )

    def __init__(self, *args: Any, **shared: Any):
        super().__init__(*args, **shared)
        options = self.options
        kinds = {options.head, options.tail} - {"identity"}
        self.is_complex, self.relation_is_complex = "complex" in kinds, kinds == {"complex"}
        self.is_distance = self.measures_distance(options)
        on_answers = {options.tail} if self.reciprocal else kinds
        self._has_offsets = options.comparator == "dot" and "translation" in on_answers
        plain = ("identity", "translation") if self.is_distance else ("identity",)
        self.comparison = OperatedRows(
            options.comparator, options.temperature, options.tail not in plain
        )
        if options.comparator == "dot":
            self.comparison = Shifted(InnerProduct()) if self._has_offsets else InnerProduct()

    @classmethod
    def multiple_of(cls, options: Options) -> int:
        return 2 if "complex" in (options.head, options.tail) else 1

    @classmethod
    def relation_dim(cls, dim: int, options: Options) -> int:
        return sum(widths(options, dim))

    @classmethod
    def measures_distance(cls, options: Options) -> bool:
        return options.comparator == "l2"

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize operators to the identity plus values as configured."""
        super().reset_parameters(fill, stream)
        for operator, rows in self._operators(self.relations):
            if operator == "diagonal":
                rows += 1
            elif operator == "complex":
                rows[:, ::2] += 1
            elif operator == "linear":
                rows += torch.eye(self.dim).flatten()

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Any:
        own, other = self._operators(relation)
        if side == "head":
            own, other = other, own
        point, (operator, parameters) = applied(own[0], anchor, own[1]), other
        comparator = self.options.comparator
        if comparator == "l2" and operator == "translation":
            return point - parameters, None, "identity"
        if comparator != "dot":
            return point, parameters if operator != "identity" else None, operator
        point = point / self.options.temperature
        vector = transposed(operator, point, parameters)
        if not self._has_offsets:
            return vector
        offset = point * parameters if operator == "translation" else torch.zeros_like(point)
        return vector, offset.sum(-1, keepdim=True)

    def _operators(self, relation: Tensor) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
        """Return the name and the parameters of the head's and of the tail's operator."""
        head, tail = relation.split(widths(self.options, self.dim), -1)
        return (self.options.head, head), (self.options.tail, tail)
