"""A table that keeps the gradients of a step against all entities instead of stepping by them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from scorer_cases import RELATIONS, SCORERS

from kge_torchrec.distributed.dense import DenseWrapper
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.losses import SoftmaxLoss
from kge_torchrec.models.model import Objective
from kge_torchrec.models.regularizers import L2, Regularizers

ENTITIES = 11
CPU = torch.device("cpu")


class Recorder:
    """An engine that keeps gradients instead of stepping by them."""

    def __init__(self, objective: Objective, rows: torch.Tensor):
        self.unwrapped_model = SimpleNamespace(objective=objective, scale=None)
        self.dense = DenseWrapper()
        self.dense.wrap(self.unwrapped_model)
        self.rows, self.table = rows, self
        self.optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)

    def shard(self) -> EntityShard:
        return EntityShard(self.rows, 0, len(self.rows))

    def step_rows(self, gradients) -> None:
        self.grad = torch.full_like(self.rows, torch.nan)
        for part in gradients:
            assert self.grad[part.ids].isnan().all()  # each row once
            self.grad[part.ids] = part.grad
        assert not self.grad.isnan().any()


def objective_of(case, reciprocal: bool, **shared) -> Objective:
    name, dim, options = case
    torch.manual_seed(0)
    kind = SCORERS[name]
    vector_dim = dim - 2 * kind.has_biases
    scorer = kind(RELATIONS, vector_dim, reciprocal, **options, **shared)
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return Objective(scorer, SoftmaxLoss(), regularizers=Regularizers(0.02, [L2(0.01)]))
