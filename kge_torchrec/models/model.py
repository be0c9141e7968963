"""A knowledge-graph model: the entity lookup, then the objective."""

from __future__ import annotations

from torch import Tensor, nn

from kge_torchrec.data.batches import ENTITY
from kge_torchrec.models.loss_scaling import HeldRows, LossScale
from kge_torchrec.models.objective import Objective


class KnowledgeGraphModel(nn.Module):
    """entities -> rows -> loss.

    ``entities`` is called as ``entities(batch.ids)[ENTITY].values()``, (U, D).  The forward stays
    this short because TorchRec traces it to find the lookup that it pipelines; everything with
    control flow lives in the objective.

    scales_loss: multiply the loss by a dynamic scale and hold the rows' gradients back.
    """

    def __init__(self, entities: nn.Module, objective: Objective, scales_loss: bool = False):
        super().__init__()
        self.entities, self.objective = entities, objective
        self.hold = HeldRows() if scales_loss else nn.Identity()
        self.scale = LossScale() if scales_loss else nn.Identity()

    def forward(self, batch) -> tuple[Tensor, Tensor]:
        """Returns (loss to differentiate, the loss itself, detached)."""
        rows = self.entities(batch.ids)[ENTITY].values()
        loss = self.objective(self.hold(rows), batch)
        return self.scale(loss), loss.detach()
