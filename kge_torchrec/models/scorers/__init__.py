"""Scorers. Each file holds one family; ``base`` defines the contract."""

from __future__ import annotations

from dataclasses import asdict

from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.config.registry import construct, resolve
from kge_torchrec.models.scorers.base import BIASES, SIDES, Scorer, Side


def build_scorer(config: ModelConfig, num_relations: int) -> Scorer:
    """Return the scorer that a config describes, with uninitialized parameters.

    Args:
        config: The model section of the config.
        num_relations: Number of relations, without inverses.

    Raises:
        ConfigError: A scorer of another package has another ``__init__``.
    """
    dropout = config.dropout
    has_biases = config.biases or resolve("scorer", config.scorer).has_biases
    scorer: Scorer = construct(
        "scorer",
        config.scorer,
        num_relations,
        config.dim - (BIASES if has_biases else 0),
        config.reciprocal,
        normalization=config.normalization,
        relation_dropout=dropout.relation,
        input_dropout=dropout.input,
        hidden_dropout=dropout.hidden,
        biases=config.biases,
        **asdict(config.options_in("options")),
    )
    if not hasattr(scorer, "relations"):
        raise ConfigError(
            f"model.scorer: {config.scorer} has no relations; let its __init__ call "
            "super().__init__(*args, **kwargs) first"
        )
    if not hasattr(scorer, "comparison"):
        raise ConfigError(
            f"model.scorer: {config.scorer} has no comparison of queries with rows; give its class "
            "one, such as comparison = InnerProduct() of kge_torchrec.kernels.comparisons"
        )
    return scorer


__all__ = ["SIDES", "Scorer", "Side", "build_scorer"]
