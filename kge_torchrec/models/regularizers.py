"""Penalties on the rows that a batch touches, so that they cost O(batch), not O(table).

    N3    Lacroix et al. 2018         sum |x|^3, with moduli for complex numbers
    L2                                sum x^2
    DURA  Zhang, Cai and Wang 2020    |q(h, r)|^2 + |t|^2 + |q'(t, r)|^2 + |h|^2
    IVR   Xiao and Cao 2024           norms of all intermediate variables of the score

Shapes: D elements per row, of an entity or a relation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from kge_torchrec.config.checks import Check, ConfigError, NonNegativeFloat
from kge_torchrec.config.model import LossConfig
from kge_torchrec.config.registry import construct
from kge_torchrec.data import OTHER
from kge_torchrec.kernels.operators import lookup

if TYPE_CHECKING:
    from kge_torchrec.models.scorers.base import Scorer, Side


class Regularizer:
    """A penalty on each row of a triple, added to the triple's loss with a weight.

    Subclasses implement ``penalty``. The constructor takes the fields of ``Options`` and keeps them
    as ``options``. ``weight`` and ``relation_weight`` are those of the options if they have them.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of this regularizer, from ``loss.regularizers`` of the config."""

        weight: float = 0.0
        """Factor of the penalty in the loss."""
        relation_weight: float | None = None
        """Factor of the penalty on relation rows; null: weight."""

    takes_triples = False  # whether it is a ``TripleRegularizer``

    def __init__(self, *values: Any, **options: Any):
        self.options: Any = self.Options(*values, **options)  # typed Any: each class has its own
        self.weight: float = getattr(self.options, "weight", 1.0)
        self.relation_weight: float | None = getattr(self.options, "relation_weight", None)

    def penalty(self, rows: Tensor, is_complex: bool) -> Tensor:
        """Return the penalty of each row: (..., D) -> (...).

        ``is_complex`` rows hold D/2 complex numbers, (re, im, re, ...).
        """
        raise NotImplementedError


class N3(Regularizer):
    """Nuclear 3-norm (Lacroix et al. 2018): sum of |x|^3."""

    def penalty(self, rows: Tensor, is_complex: bool) -> Tensor:
        return _CubedModuli.apply(rows) if is_complex else rows.abs().pow(3.0).sum(-1)


class L2(Regularizer):
    """Sum of squares."""

    def penalty(self, rows: Tensor, is_complex: bool) -> Tensor:
        return rows.square().sum(-1)


class _CubedModuli(torch.autograd.Function):
    """The sum over complex numbers of |z|^3, with the gradient 3 |z| z.

    This takes fewer passes than differentiating through the real and imaginary parts.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        real, imaginary = rows.unflatten(-1, (-1, 2)).unbind(-1)
        squares = real.square().addcmul_(imaginary, imaginary)
        moduli = squares.add_(1e-30).sqrt()
        ctx.save_for_backward(rows, moduli)
        return (squares * moduli).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rows, moduli = ctx.saved_tensors
        gradient = moduli * (3.0 * grad)[..., None]
        return (rows.unflatten(-1, (-1, 2)) * gradient[..., None]).flatten(-2)


class TripleRegularizer(Regularizer):
    """A penalty on a whole triple. Subclasses implement ``penalty_of_triples``.

    Available in training types whose queries are triples: sampled and 1vsall.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of this regularizer."""

        weight: float = 0.0
        """Factor of the penalty in the loss."""

    takes_triples = True

    @classmethod
    def check_scorer(cls, scorer: type[Scorer], key: str) -> None:
        """Raise ConfigError, which begins with the key, if the scorer is not supported."""

    def penalty_of_triples(
        self, scorer: Any, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> Tensor:
        """Return the penalty (...) of each triple.

        Args:
            scorer: The scorer.
            anchor: (..., D) entity rows as stored.
            relation: (...) int64 relation ids.
            answer: (..., D) entity rows as stored.
            side: The end that the answer is.
        """
        raise NotImplementedError


class DURA(TripleRegularizer):
    """Duality-induced regularization (Zhang, Cai and Wang 2020): treats the score as a distance.

    |q - t|^2 consists of |q|^2 + |t|^2, which this penalizes, and the score <q, t>. The same holds
    for h and the adjoint query q', <q(h, r), t> = <q'(t, r), h>. Supports scorers that are linear
    in head and tail.
    """

    @classmethod
    def check_scorer(cls, scorer: type[Scorer], key: str) -> None:
        if not scorer.is_bilinear:
            raise ConfigError(
                f"{key}: DURA takes scorers that are linear in head and tail (complex, distmult, "
                f"rescal, ...), which {scorer.name or scorer.__name__} is not; use n3 or l2"
            )

    def penalty_of_triples(
        self, scorer: Any, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> Tensor:
        relation, side = scorer.direct(relation, side)
        rows = scorer.relation(relation, drop=False)
        x, y = scorer.vectors(anchor), scorer.vectors(answer)
        parts = scorer.query(x, rows, side), y, scorer.query(y, rows, OTHER[side]), x
        return sum(part.square().sum(-1) for part in parts)


class IVR(TripleRegularizer):
    """Intermediate variables regularization (Xiao and Cao, NeurIPS 2024, arXiv 2506.02749).

    The penalty of a triple is the sum over the parts of its rows, which are numbers whose lengths
    are multiplicative (DistMult: real, ComplEx: complex, QMult: quaternion), of

        2 lambda1 (|h|^a + |r|^a + |t|^a) + 2 lambda2 (|h|^a |r|^a + |r|^a |t|^a + |t|^a |h|^a)

    The authors' code (github.com/changyi7231/IVR) adds norms of products with the core tensor W of
    the score, such as |W x_1 h|^a / P^(a / 2) for parts of P elements and |W x_1 h x_2 r|^a. For
    such numbers they equal the norms without W, hence the factor 2. Their code has four weights
    and their table of settings two. That norms with and without W share a weight is inferred: the
    sum for WN18RR, with a = 3, is the weight of N3 there.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of this regularizer."""

        alpha: Annotated[float, Check("a number >= 1", lambda alpha: alpha >= 1)] = 3.0
        """Exponent of the norms, at least 1."""
        lambda1: NonNegativeFloat = 0.0
        """Weight of the norms of head, relation and tail."""
        lambda2: NonNegativeFloat = 0.0
        """Weight of the norms of their pairs."""

    def __init__(self, *values: Any, **options: Any):
        super().__init__(*values, **options)
        self.weight = 1.0 if self.options.lambda1 or self.options.lambda2 else 0.0

    @classmethod
    def check_scorer(cls, scorer: type[Scorer], key: str) -> None:
        if scorer.part_size is None:
            raise ConfigError(
                f"{key}: IVR takes distmult, complex, qmult and quate, not "
                f"{scorer.name or scorer.__name__}; use n3 or dura"
            )

    def penalty_of_triples(
        self, scorer: Any, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> Tensor:
        relation_rows = scorer.relation(scorer.direct(relation, side)[0], drop=False)
        options, powers = self.options, []
        for rows in (scorer.vectors(anchor), relation_rows, scorer.vectors(answer)):
            parts = rows.unflatten(-1, (-1, scorer.part_size)).unbind(-1)
            # The gradient at 0 is 0: an exponent below 0 would make it nan.
            powers.append((sum(part.square() for part in parts) + 1e-30).pow(options.alpha / 2))
        x, y, z = powers
        total = 2 * options.lambda1 * (x + y + z) + 2 * options.lambda2 * (x * y + y * z + z * x)
        return total.sum(-1)


class Regularizers:
    """The regularizers of a model: N3 and any others, each with its weight."""

    def __init__(self, n3: float = 0.0, others: Iterable[Regularizer] = ()):
        self.on_entities: list[tuple[float, Regularizer]] = []
        self.on_relations: list[tuple[float, Regularizer]] = []
        self.on_triples: list[tuple[float, Any]] = []
        for part in (N3(n3), *others):
            own = part.weight if part.relation_weight is None else part.relation_weight
            if part.takes_triples:
                self.on_triples += [(part.weight, part)] if part.weight else []
            else:
                self.on_entities += [(part.weight, part)] if part.weight else []
                self.on_relations += [(own, part)] if own else []

    def __bool__(self) -> bool:
        return bool(self.on_entities or self.on_relations or self.on_triples)

    def of_entities(self, scorer: Scorer, rows: Tensor) -> Tensor:
        """Return the weighted penalties of entity rows as stored: (..., D) -> (...)."""
        factors, is_complex = scorer.split_biases(rows)[0], scorer.is_complex
        each = (weight * part.penalty(factors, is_complex) for weight, part in self.on_entities)
        return sum(each, rows.new_zeros(rows.shape[:-1]))

    def of_relations(self, scorer: Scorer, relation: Tensor, side: Side) -> Tensor:
        """Return the weighted penalties of the rows of queries' relation ids: (...) -> (...)."""
        factors = lookup(scorer.relations, scorer.direct(relation, side)[0])
        is_complex = scorer.relation_is_complex
        each = (weight * part.penalty(factors, is_complex) for weight, part in self.on_relations)
        return sum(each, factors.new_zeros(relation.shape))

    def of_triples(
        self, scorer: Scorer, anchor: Tensor, relation: Tensor, answer: Tensor, side: Side
    ) -> Tensor:
        """Return the weighted penalties (...) of triples; arguments as ``penalty_of_triples``."""
        triples = anchor, relation, answer, side
        each = (weight * part.penalty_of_triples(scorer, *triples)
                for weight, part in self.on_triples)  # fmt: skip
        return sum(each, anchor.new_zeros(relation.shape))


def build_regularizers(config: LossConfig) -> Regularizers:
    """Make the regularizers of loss.n3 and loss.regularizers, with their weights for relations."""
    chosen = config.regularizer_options().items()
    others = [construct("regularizer", name, **asdict(options)) for name, options in chosen]
    return Regularizers(config.n3, others)
