"""Settings of scorer and loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kge_torchrec.config.checks import ConfigError, at_least, check, not_negative, one_of, positive
from kge_torchrec.models.scorer_options import (
    DECLARATIONS,
    ScorerOptions,
    check_scorer,
    chosen_options,
)

SCORER_NAMES = tuple(DECLARATIONS)
INIT_NAMES = ("normal", "uniform", "xavier_normal", "xavier_uniform")


@dataclass(frozen=True)
class ModelConfig:
    """The scorer and its parameters.

    Args:
        scorer: transe_l1, transe_l2, transh, distmult, complex, rotate, simple, rescal, tucker,
            qmult, quate, omult, duale, keci, ckeci, decal, mure, pairre, house, pyke, conve,
            conex, aconex, convq, convo, coke, shallom or lfmult.
        dim: Real numbers an entity, whatever the scorer makes of them (complex: dim / 2 complex
            numbers).
        reciprocal: Give every relation a twin for head queries (Lacroix et al. 2018).
        init: Distribution of the start: normal, uniform, xavier_normal or xavier_uniform.
        init_scale: Standard deviation (normal) or half width (uniform) of the start.
        normalization: none; unit (entities have Euclidean length 1); or layer (a LayerNorm of
            entities, another of relations).
        input_dropout: Share of the numbers of a query's entity and relation that are dropped.
        hidden_dropout: Share of the numbers of a folded query that are dropped; of networks, of
            their hidden layers too.
        options: Settings of single scorers.
    """

    scorer: str = "complex"
    dim: int = 128
    reciprocal: bool = True
    init: str = "normal"
    init_scale: float = 1e-3
    normalization: str = "none"
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0
    options: ScorerOptions = field(default_factory=ScorerOptions)

    def __post_init__(self) -> None:
        name = self.scorer.lower().replace("-", "_")
        object.__setattr__(self, "scorer", "transe_l1" if name == "transe" else name)
        one_of("model.scorer", self.scorer, SCORER_NAMES)
        at_least("model.dim", self.dim, 1)
        one_of("model.init", self.init, INIT_NAMES)
        positive("model.init_scale", self.init_scale)
        one_of("model.normalization", self.normalization, ("none", "unit", "layer"))
        for key in ("input_dropout", "hidden_dropout"):
            value = getattr(self, key)
            check(0 <= value < 1, f"model.{key}", "in [0, 1)", value)
        if self.hidden_dropout and DECLARATIONS[self.scorer].is_distance:
            raise ConfigError(
                f"model.hidden_dropout has no meaning for {self.scorer}, whose query is a point"
            )
        try:
            check_scorer(self.scorer, self.dim, self.reciprocal, self.scorer_options())
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def scorer_options(self) -> dict[str, Any]:
        """The scorer's own options, with its defaults for those that are null."""
        return chosen_options(self.scorer, self.options)


@dataclass(frozen=True)
class LossConfig:
    """The loss of a query and the penalties on touched rows.

    Args:
        name: softmax (cross-entropy over the candidates), bce (logistic), margin or
            self_adversarial.
        margin: Of margin and self_adversarial.
        temperature: Of self_adversarial.
        reduction: Of bce: sum, or mean, over all candidates of a query, answers included.
        label_smoothing: Of softmax and bce, in [0, 1).
        n3: Weight of the nuclear 3-norm penalty.
        l2: Weight of the squared-norm penalty.
        relation_weight: Weight of telling a triple's relation by its entities (Chen et al. 2021).
    """

    name: str = "softmax"
    margin: float = 9.0
    temperature: float = 1.0
    reduction: str = "sum"
    label_smoothing: float = 0.0
    n3: float = 0.0
    l2: float = 0.0
    relation_weight: float = 0.0

    def __post_init__(self) -> None:
        one_of("loss.name", self.name, ("softmax", "bce", "margin", "self_adversarial"))
        for key in ("margin", "temperature", "n3", "l2", "relation_weight"):
            not_negative(f"loss.{key}", getattr(self, key))
        one_of("loss.reduction", self.reduction, ("sum", "mean"))
        if self.reduction != "sum" and self.name != "bce":
            raise ConfigError(f"loss.reduction has no meaning for loss.name {self.name!r}")
        smooth = self.label_smoothing
        check(0 <= smooth < 1, "loss.label_smoothing", "in [0, 1)", smooth)
        if smooth and self.name not in ("softmax", "bce"):
            raise ConfigError(f"loss.label_smoothing has no meaning for loss.name {self.name!r}")
