"""Scorers by name.  One short file each; ``base`` holds the contract they share."""

from __future__ import annotations

from kge_torchrec.config import ModelConfig
from kge_torchrec.models.scorers.aconex import AConEx
from kge_torchrec.models.scorers.base import SIDES, Scorer, Side
from kge_torchrec.models.scorers.coke import CoKE
from kge_torchrec.models.scorers.complex import ComplEx
from kge_torchrec.models.scorers.conex import ConEx
from kge_torchrec.models.scorers.conve import ConvE
from kge_torchrec.models.scorers.convo import ConvO
from kge_torchrec.models.scorers.convq import ConvQ
from kge_torchrec.models.scorers.decal import DeCaL
from kge_torchrec.models.scorers.distmult import DistMult
from kge_torchrec.models.scorers.duale import DualE
from kge_torchrec.models.scorers.house import HousE
from kge_torchrec.models.scorers.keci import CKeci, Keci
from kge_torchrec.models.scorers.lfmult import LFMult
from kge_torchrec.models.scorers.mure import MuRE
from kge_torchrec.models.scorers.omult import OMult
from kge_torchrec.models.scorers.pairre import PairRE
from kge_torchrec.models.scorers.pyke import Pyke
from kge_torchrec.models.scorers.qmult import QMult
from kge_torchrec.models.scorers.quate import QuatE
from kge_torchrec.models.scorers.rescal import RESCAL
from kge_torchrec.models.scorers.rotate import RotatE
from kge_torchrec.models.scorers.shallom import Shallom
from kge_torchrec.models.scorers.simple import SimplE
from kge_torchrec.models.scorers.transe import TransEL1, TransEL2
from kge_torchrec.models.scorers.transh import TransH
from kge_torchrec.models.scorers.tucker import TuckER

SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer
    for scorer in (
        TransEL1, TransEL2, TransH, DistMult, ComplEx, RotatE, SimplE, RESCAL, TuckER,
        QMult, QuatE, OMult, DualE, Keci, CKeci, DeCaL, MuRE, PairRE, HousE, Pyke,
        ConvE, ConEx, AConEx, ConvQ, ConvO, CoKE, Shallom, LFMult,
    )
}  # fmt: skip


def build_scorer(config: ModelConfig, num_relations: int) -> Scorer:
    """The scorer that a config describes, its parameters not yet started."""
    return SCORERS[config.scorer](
        num_relations,
        config.dim,
        config.reciprocal,
        normalization=config.normalization,
        input_dropout=config.input_dropout,
        hidden_dropout=config.hidden_dropout,
        **config.scorer_options(),
    )


__all__ = ["SCORERS", "SIDES", "Scorer", "Side", "build_scorer"]
