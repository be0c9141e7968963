"""A calibrated model of random numbers over a small store, to serve."""

from __future__ import annotations

import torch

from kge_torchrec.answers import AnsweringModel
from kge_torchrec.answers.calibration import Calibration, Curve
from kge_torchrec.config import ModelConfig
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers import build_scorer

N, R, D = 37, 3, 8


def model_of(store):
    scorer = build_scorer(ModelConfig("complex", D, True), R)
    torch.manual_seed(0)
    torch.nn.init.normal_(scorer.relations)
    shard = EntityShard(torch.randn(N, D), 0, N, replicated=True)
    calibration = Calibration({"tail": Curve(0.1, 0.0)}, {}, 1, "", {})
    return AnsweringModel(scorer, shard, store, calibration=calibration)
