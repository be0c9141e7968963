"""Scorers by name.  One short file each; ``base`` holds the contract they share."""

from __future__ import annotations

from kge_torchrec.models.scorers.base import SIDES, Scorer, Side
from kge_torchrec.models.scorers.complex import ComplEx
from kge_torchrec.models.scorers.distmult import DistMult
from kge_torchrec.models.scorers.rotate import RotatE
from kge_torchrec.models.scorers.transe import TransEL1, TransEL2

SCORERS: dict[str, type[Scorer]] = {
    "transe_l1": TransEL1,
    "transe_l2": TransEL2,
    "distmult": DistMult,
    "complex": ComplEx,
    "rotate": RotatE,
}

__all__ = ["SCORERS", "SIDES", "Scorer", "Side"]
