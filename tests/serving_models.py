"""A model of random numbers over a small store, to serve."""

from __future__ import annotations

import torch

from kge_torchrec.answers.answering import Answering
from kge_torchrec.answers.model import AnsweringModel
from kge_torchrec.config import ModelConfig
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers import build_scorer

N, R, D = 37, 3, 8


class Answers(Answering):
    """The Python interface to the same model."""

    def __init__(self, model):
        self.model = model

    def answering_model(self):
        return self.model


def model_of(store, with_data=True):
    scorer = build_scorer(ModelConfig("complex", D, True), R)
    torch.manual_seed(0)
    torch.nn.init.normal_(scorer.relations)
    shard = EntityShard(torch.randn(N, D), 0, N, alone=True)
    labels = (lambda: store.entities), (lambda: store.relations)
    return AnsweringModel(scorer, shard, *labels, store if with_data else None)
