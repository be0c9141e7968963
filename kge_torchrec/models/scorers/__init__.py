"""All built-in scorers by name. Each file holds one family; ``base`` defines the contract."""

from __future__ import annotations

from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.config.registry import construct, resolve
from kge_torchrec.models.scorers.algebra import DualE, LFMult, OMult, QMult, QuatE
from kge_torchrec.models.scorers.base import BIASES, SIDES, Scorer, Side
from kge_torchrec.models.scorers.bilinear import MEIM, RESCAL, ComplEx, DistMult, SimplE, TuckER
from kge_torchrec.models.scorers.clifford import CKeci, DeCaL, Keci
from kge_torchrec.models.scorers.convolution import AConEx, ConEx, ConvE, ConvO, ConvQ
from kge_torchrec.models.scorers.hyperbolic import RotH
from kge_torchrec.models.scorers.operators import Operator
from kge_torchrec.models.scorers.rotational import HousE, RotatE, RotatEL2, RotE
from kge_torchrec.models.scorers.transformer import CoKE
from kge_torchrec.models.scorers.translational import MuRE, PairRE, Pyke, TransEL1, TransEL2, TransH

SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer
    for scorer in (
        TransEL1, TransEL2, TransH, DistMult, ComplEx, RotatE, RotatEL2, SimplE, RESCAL, TuckER,
        QMult, QuatE, OMult, DualE, Keci, CKeci, DeCaL, MuRE, PairRE, HousE, Pyke,
        ConvE, ConEx, AConEx, ConvQ, ConvO, CoKE, LFMult, RotE, RotH, MEIM,
        Operator,
    )
}  # fmt: skip


def build_scorer(config: ModelConfig, num_relations: int) -> Scorer:
    """Return the scorer that a config describes, with uninitialized parameters.

    Args:
        config: The model section of the config.
        num_relations: Number of relations, without inverses.

    Raises:
        ConfigError: A scorer of another package has another ``__init__``.
    """
    dropout = config.dropouts
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
        **config.scorer_options(),
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


__all__ = ["SCORERS", "SIDES", "Scorer", "Side", "build_scorer"]
