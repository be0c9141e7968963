"""The interface of embedding backends to training, ranking, prediction and checkpoints.

A backend owns the entity table: one row of ``dim`` elements per entity, sharded row-wise over the
ranks.  Code outside ``kge_torchrec.embeddings`` uses only ``EmbeddingBackend`` and ``EntityShard``
(the rows of one rank), so backends are interchangeable.

Shapes: N entities, D elements per row, n rows on this rank, M ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kge_torchrec.data import ENTITY
from kge_torchrec.distributed.processes import Rows, world_size

if TYPE_CHECKING:
    from kge_torchrec.data.batches import SampledBatch
    from kge_torchrec.distributed.dense import DenseWrapper, NamedOptimizer
    from kge_torchrec.embeddings.row_gradients import RowGradients, TableBlock
    from kge_torchrec.models.model import KGEModel
    from kge_torchrec.models.scorers import Scorer

__all__ = ["ENTITY", "ENTITY_WEIGHT", "EmbeddingBackend", "EntityShard"]


class Optimizer(Protocol):
    """The optimizer of the table and the dense parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients.  Call it before the first backward of a step."""

    def step(self) -> None:
        """Update all parameters.  Call it after the last backward of a step."""


class EmbeddingBackend(Protocol):
    """An entity table and a model around it, ready to train."""

    model: nn.Module  # called as model(batch) -> (loss, detached metrics); owns table and scorer
    gains_by_pipeline: bool  # whether TrainPipelineSparseDist is faster than a plain loop
    layout: str  # human-readable: what each rank holds
    dense: DenseWrapper  # how the dense parameters are distributed over the ranks
    unwrapped_model: KGEModel  # the model inside all wrappers
    scorer: Scorer  # the scorer of the model; this rank may hold only parts of its parameters

    @property
    def dense_optimizer(self) -> NamedOptimizer:
        """The optimizer of the dense parameters."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the table and the dense parameters."""

    @property
    def pending(self) -> TableBlock | None:
        """Keeps gradients between backward and step; None if the kernel steps in backward."""

    @property
    def prepare(self) -> Callable[[SampledBatch], SampledBatch] | None:
        """Finishes the host-side work on a batch before it moves to its device.  Collective.

        None if there is no such work.
        """

    def shard(self) -> EntityShard:
        """Return this rank's rows after the last finished step."""

    def state(self) -> list[Rows]:
        """Return this rank's rows of a checkpoint: table, scorer and optimizer state.

        Names and rows are the same in every backend, so a checkpoint resumes with another backend
        and another number of ranks.  Loading writes into the rows.
        """

    @property
    def table_step(self) -> int:
        """The number of steps of the table's optimizer on this rank, which resuming sets."""

    @table_step.setter
    def table_step(self, steps: int) -> None: ...

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """Take one step of the table's optimizer on rows of this rank, without a lookup.

        The whole call counts as one step, also on ranks without rows.  Call
        ``optimizer.zero_grad()`` before it, so that the table gets its current learning rate.

        Args:
            gradients: Parts that together hold each row at most once, already summed over all
                ranks.  A part is used before the next one is requested, so a generator keeps only
                one part in memory.  The call is collective if iterating over ``gradients`` is.
        """

    def set_learning_rate(self, factor: float) -> None:
        """Multiply the base learning rates of table and dense parameters from now on."""

    def skip_step(self) -> None:
        """Discard a step.  Call it instead of ``optimizer.step`` if the gradients are unusable."""


# The table's name in a checkpoint of any backend, after "model." and "optimizer.".
ENTITY_WEIGHT = f"entities.embeddings.{ENTITY}.weight"


@dataclass(frozen=True)
class EntityShard:
    """A view of the rows of the entity table on this rank.  Writes change the table."""

    rows: Tensor  # (n, D); n may be 0 when there are more ranks than entities
    first_row: int  # global id of rows[0]
    num_entities: int  # N, over all ranks
    replicated: bool = False  # this rank holds all rows, even if there are other ranks
    scored_on: torch.device | None = None  # the scorer's device; None: that of the rows
    in_main_memory: bool = False  # the device of the rows is a GPU, which reads them over its link

    @property
    def device(self) -> torch.device:
        """The device that rows are scored on, and ``fetch`` puts them on."""
        return self.rows.device if self.scored_on is None else self.scored_on

    @property
    def ranks(self) -> int:
        """Number of ranks that the rows are split over; all of them take part in ``fetch``."""
        return 1 if self.replicated else world_size()

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    @property
    def row_range(self) -> tuple[int, int]:
        """Global ids [start, stop) of the rows on this rank."""
        return self.first_row, self.first_row + self.rows.shape[0]

    def holds(self, ids: Tensor) -> Tensor:
        """Return (M,) bool: which of the global ids (M,) are on this rank."""
        start, stop = self.row_range
        return (ids >= start) & (ids < stop)

    def own(self, places: Tensor | slice) -> Tensor:
        """Return rows of this rank by their places in ``rows``, on ``device``."""
        if isinstance(places, Tensor):
            places = places.to(self.rows.device)
        own = self.rows[places].to(self.device)
        # A slice is a view. Scoring reads rows several times, and the link is slow.
        return own.clone() if self.in_main_memory and isinstance(places, slice) else own

    @torch.no_grad()
    def fetch(self, ids: Tensor) -> Tensor:
        """Return the rows of global ids, on every rank.

        Collective: every rank passes the same ids.

        Args:
            ids: (M,) int64, on ``device``.

        Returns:
            (M, D) float32, on ``device``.

        Raises:
            IndexError: An id is outside [0, N).
        """
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_entities):
            raise IndexError(f"entity ids must lie in [0, {self.num_entities})")
        here = self.holds(ids)
        out = torch.zeros(ids.numel(), self.dim, device=self.device)
        out[here] = self.own(ids[here] - self.first_row).float()
        if self.ranks > 1:
            dist.all_reduce(out)
        return out
