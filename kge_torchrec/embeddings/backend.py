"""The interface of embedding backends to training, ranking, prediction and checkpoints.

A backend owns the entity table: one row of ``dim`` elements per entity, sharded row-wise over the
ranks.  Code outside ``kge_torchrec.embeddings`` uses only ``EmbeddingBackend`` and ``EntityShard``
(a view of the rows of one rank), so backends are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from kge_torchrec.data import ENTITY
from kge_torchrec.distributed.processes import Rows
from kge_torchrec.embeddings.entity_shard import ENTITY_WEIGHT, EntityShard
from kge_torchrec.embeddings.init import fill_rows

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from kge_torchrec.data.batches import SampledBatch
    from kge_torchrec.distributed.dense import DenseWrapper
    from kge_torchrec.embeddings.shard import TableShard
    from kge_torchrec.models.model import KGEModel
    from kge_torchrec.models.scorers import Scorer

__all__ = ["ENTITY", "ENTITY_WEIGHT", "EmbeddingBackend", "EntityShard", "StepBoth"]


class StepBoth:
    """Steps the dense parameters, then the table, whose step may run in a thread.

    TorchRec's CombinedOptimizer would nest three optimizers around these two, which small steps
    feel.
    """

    def __init__(self, table: Any, dense: Optimizer):
        self._table, self._dense = table, dense
        self.param_groups: list[dict[str, Any]] = [*table.param_groups, *dense.param_groups]
        self._rates = [group["lr"] for group in self.param_groups]

    def zero_grad(self) -> None:
        self._table.zero_grad()
        self._dense.zero_grad()

    def step(self) -> None:
        self._dense.step()
        self._table.step()

    def set_rate(self, factor: float) -> None:
        """Multiply the learning rates of the start by a factor, from the next step on."""
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor


class EmbeddingBackend:
    """An entity table and a model around it, ready to train.  Engines are subclasses.

    Collective: every rank makes one with the same config, entity tables, objective, function that
    makes the optimizer of the dense parameters, and ranks.

    Attributes:
        model: Called as ``model(batch) -> (loss, detached metrics)``; holds lookups and scorer.
        unwrapped_model: The model inside all wrappers.
        scorer: The scorer of the model; this rank may hold only parts of its parameters.
        table: This rank's rows of the entity table.
        pending: ``table`` if it keeps gradients between backward and step; None if FBGEMM steps in
            backward.
        dense: How the dense parameters are distributed over the ranks.
        dense_optimizer: The optimizer of the dense parameters.
        optimizer: The optimizer of the table and the dense parameters.
        layout: Readable text: what each rank holds.
        gains_by_pipeline: Whether TrainPipelineSparseDist is faster than a plain loop.
        prepare: Finishes the host-side work on a batch before it moves to its device (collective);
            None if there is no such work.
    """

    model: nn.Module
    unwrapped_model: KGEModel
    scorer: Scorer
    table: TableShard
    pending: TableShard | None
    dense: DenseWrapper
    dense_optimizer: Optimizer
    optimizer: StepBoth
    layout: str
    gains_by_pipeline = False
    prepare: Callable[[SampledBatch], SampledBatch] | None = None

    def fill_rows(self, seed: int) -> None:
        """Write the initial values of this rank's rows."""
        for table in self.table.tables:
            fill_rows(self.shard(), seed, table.init, table.ids)

    def shard(self) -> EntityShard:
        """Return this rank's rows after the last finished step."""
        return self.table.shard()

    def state(self) -> list[Rows]:
        """Return this rank's rows of a checkpoint: table, scorer and optimizer state.

        Names and rows are the same in every backend, so a checkpoint resumes with another backend
        and another number of ranks.  Loading writes into the rows.
        """
        return [*self.table.state(), *self.dense.state(self.dense_optimizer)]

    def skip_step(self) -> None:
        """Discard a step.  Call it instead of ``optimizer.step`` if the gradients are unusable."""
