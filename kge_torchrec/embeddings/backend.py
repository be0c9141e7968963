"""What every embedding backend offers to training, ranking, prediction and checkpoints.

A backend owns the entity table: one row of ``dim`` numbers per entity, split by rows over the
ranks.  Everything outside ``kge_torchrec.embeddings`` talks to it through ``EmbeddingBackend`` and
``EntityShard``, the rows that a rank holds, so backends are interchangeable.

Shapes: N entities, D numbers per entity, n rows on this rank, M ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kge_torchrec.data import ENTITY
from kge_torchrec.distributed.processes import world_size

if TYPE_CHECKING:
    from kge_torchrec.data.batches.queries import SampledBatch
    from kge_torchrec.distributed.dense import DenseWrapper
    from kge_torchrec.embeddings.pending import PendingGradients, RowGradients
    from kge_torchrec.models.model import KGEModel
    from kge_torchrec.models.scorers import Scorer

__all__ = ["ENTITY", "ENTITY_WEIGHT", "EmbeddingBackend", "EntityShard"]


class Optimizer(Protocol):
    """What steps the table and the dense parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Before the first backward of a step."""

    def step(self) -> None:
        """After its last one."""


class EmbeddingBackend(Protocol):
    """The entity side of a model that is ready to train."""

    model: nn.Module  # called as model(batch) -> (loss, detached metrics); owns table and scorer
    gains_by_pipeline: bool  # whether TrainPipelineSparseDist has anything to overlap
    layout: str  # which rank holds what, for people
    dense: DenseWrapper  # how the dense parameters lie on the ranks
    unwrapped_model: KGEModel  # the model inside all wrappers
    scorer: Scorer  # inside that; this rank may hold parts of its parameters only

    @property
    def optimizer(self) -> Optimizer:
        """Of table and dense parameters."""

    @property
    def pending(self) -> PendingGradients | None:
        """Table gradients between backward and step; None where the kernel steps in backward."""

    def prepare(self, batch: SampledBatch) -> SampledBatch:
        """What is left to do on the host before a batch moves to its device.  Collective."""

    def shard(self) -> EntityShard:
        """This rank's rows, current as of the last finished step."""

    def parameter_state(self) -> dict[str, Any]:
        """The parameters for a checkpoint, by name; the table's is ENTITY_WEIGHT."""

    def load_parameter_state(self, state: dict[str, Any]) -> None:
        """Takes back what ``parameter_state`` gave, after a distributed load filled it in."""

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint needs: parameters, optimizer state and the step of the table.

        The same names and forms in every backend, sharded by rows of any sizes, so that a
        checkpoint of one backend and world size resumes in others.
        """

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what ``state`` gave, after a distributed load filled it in."""

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """One step of the table's optimizer on rows of this rank, without a lookup.

        gradients: some rows after others, each row once, already summed over all ranks; made
        while earlier ones step, so that they need not be in memory together.  However many there
        are, it is one step; ranks without rows count it as well.  Collective only as far as
        ``gradients`` is.  Call ``optimizer.zero_grad()`` before, so that the learning rate is
        that of ``set_learning_rate``.
        """

    def freeze_rows(self, frozen: Tensor) -> None:
        """No step moves these rows of this rank, (n,) bool, or their state from here on.

        Their gradients are dropped where they arrive.  Takes a backend with ``pending``.
        """

    def freeze_dense(self, frozen: dict[str, Tensor]) -> None:
        """The same for rows, (rows,) bool, of the objective's parameters, by name."""

    def set_learning_rate(self, factor: float) -> None:
        """Multiplies the base learning rates of table and dense parameters from now on."""

    def skip_step(self) -> None:
        """Takes the place of ``optimizer.step`` when gradients are not to be used."""


# What every backend calls the table in a checkpoint, and the first part of its states' names.
ENTITY_WEIGHT = f"entities.embeddings.{ENTITY}.weight"


@dataclass(frozen=True)
class EntityShard:
    """The rows of the entity table that this rank holds, as a view: writes reach the table."""

    rows: Tensor  # (n, D); n may be 0 when there are more ranks than entities
    first_row: int  # global id of rows[0]
    num_entities: int  # N, over all ranks
    alone: bool = False  # all rows are here, whatever other ranks there are

    @property
    def ranks(self) -> int:
        """How many ranks the rows are split over, which then ask for them together."""
        return 1 if self.alone else world_size()

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    @property
    def row_range(self) -> tuple[int, int]:
        """Global ids [start, stop) held here."""
        return self.first_row, self.first_row + self.rows.shape[0]

    def holds(self, ids: Tensor) -> Tensor:
        """(M,) bool: which of the global ids live here."""
        start, stop = self.row_range
        return (ids >= start) & (ids < stop)

    @torch.no_grad()
    def fetch(self, ids: Tensor) -> Tensor:
        """Rows of the global ids (M,), as (M, D) float32 on every rank.

        Collective: every rank passes the same ids.  Raises IndexError on an id outside [0, N).
        """
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_entities):
            raise IndexError(f"entity ids must lie in [0, {self.num_entities})")
        here = self.holds(ids)
        out = torch.zeros(ids.numel(), self.dim, device=self.rows.device)
        out[here] = self.rows[ids[here] - self.first_row].float()
        if self.ranks > 1:
            dist.all_reduce(out)
        return out
