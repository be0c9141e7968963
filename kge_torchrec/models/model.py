"""A knowledge-graph model: the entity lookup, then the objective."""

from __future__ import annotations

from torch import Tensor, nn

from kge_torchrec.data.batches import ENTITY
from kge_torchrec.models.objective import Objective


class KnowledgeGraphModel(nn.Module):
    """entities -> rows -> loss.

    ``entities`` is called as ``entities(batch.ids)[ENTITY].values()``, (U, D).  The forward stays
    this short because TorchRec traces it to find the lookup that it pipelines; everything with
    control flow lives in the objective.
    """

    def __init__(self, entities: nn.Module, objective: Objective):
        super().__init__()
        self.entities, self.objective = entities, objective

    def forward(self, batch) -> tuple[Tensor, Tensor]:
        """Returns (loss to differentiate, the same loss detached)."""
        rows = self.entities(batch.ids)[ENTITY].values()
        loss = self.objective(rows, batch)
        return loss, loss.detach()
