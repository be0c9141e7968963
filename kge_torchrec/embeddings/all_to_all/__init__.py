"""The hand-rolled backend: the same model as with TorchRec, with its own table and exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from kge_torchrec.config import Config
from kge_torchrec.data.batches import SampledBatch
from kge_torchrec.distributed.dense import dense_wrapper
from kge_torchrec.distributed.processes import Processes, Rows
from kge_torchrec.embeddings.all_to_all.table import HandrolledTable
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.init import fill_rows
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.tables import EntityTable, rows_of_tables
from kge_torchrec.models.model import KGEModel, Objective

DenseOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class _NamedOptimizer:
    """An optimizer with state by parameter name, like TorchRec's KeyedOptimizer.

    It makes the checkpoints of both backends the same without loading TorchRec.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], build: DenseOptimizer):
        self._parameters = parameters
        self._optimizer = build(list(parameters.values()))
        self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state
        self.zero_grad, self.step = self._optimizer.zero_grad, self._optimizer.step

    def init_state(self) -> None:
        """Create the state by a step with zero gradients."""
        for parameter in self._parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self.step()


class _StepBoth:
    """Steps the dense parameters, then the table, whose step may run in a thread."""

    def __init__(self, table: HandrolledTable, dense: _NamedOptimizer):
        self._table, self._dense = table, dense

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._table.zero_grad()
        self._dense.zero_grad(set_to_none)

    def step(self) -> None:
        self._dense.step()
        self._table.step()


class AllToAllBackend:
    """A backend with the entities in a HandrolledTable.

    Collective: every rank builds it with the same arguments.

    Args:
        config: The config of the run.
        tables: The entity tables.
        objective: Scorer and loss.
        dense_optimizer: Builds the optimizer of the dense parameters.
        processes: The ranks of the run.
    """

    gains_by_pipeline = False

    def __init__(
        self,
        config: Config,
        tables: Sequence[EntityTable],
        objective: Objective,
        dense_optimizer: DenseOptimizer,
        processes: Processes,
    ):
        self.dense = dense_wrapper(config.dense, processes)
        self.tables, entities = tables, config.entities
        self.table = HandrolledTable(
            tables, objective.scorer.row_dim, entities.preset, processes, entities.traffic.dtype
        )
        for table in tables:
            fill_rows(self.shard(), config.seed, table.init, table.ids)
        objective = objective.to(processes.device)
        self.unwrapped_model = KGEModel(self.table, objective, config.train.precision == "fp16")
        self.scorer = objective.scorer
        self.pending = self.table.block
        self.model = self.dense.wrap(self.unwrapped_model)
        parameters = dict(self.unwrapped_model.named_parameters())
        self.dense_optimizer = _NamedOptimizer(parameters, dense_optimizer)
        self.optimizer = _StepBoth(self.table, self.dense_optimizer)
        self._base_rates = [group["lr"] for group in self.dense_optimizer.param_groups]
        self.layout = f"{_describe(self.table, tables)}\n{self.dense.describe()}"

    def prepare(self, batch: SampledBatch) -> SampledBatch:
        """Replace the ids by their route while they are on the host.  Collective."""
        return replace(batch, ids=self.table.route(batch))

    def shard(self) -> EntityShard:
        """Return this rank's rows after the last finished step."""
        return self.table.shard()

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """Take one step of the table's optimizer on rows of this rank, without a lookup."""
        self.table.step_rows(gradients)

    def set_learning_rate(self, factor: float) -> None:
        """Multiply the base learning rates of all later steps."""
        self.table.rate = factor
        for group, base in zip(self.dense_optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def skip_step(self) -> None:
        """Do nothing: the table counts only steps that were taken."""

    def state(self) -> list[Rows]:
        """Return this rank's rows of table, scorer and optimizer state."""
        states = [optimizer.states for optimizer in self.table.optimizers.values()]
        return [
            *rows_of_tables(self.tables, states, self.shard()),
            *self.dense.state(self.dense_optimizer),
        ]

    @property
    def table_step(self) -> int:
        """The number of steps of the table's optimizer on this rank.

        With preset dicee, a rank without gradients does not count.
        """
        return max(optimizer.steps for optimizer in self.table.optimizers.values())

    @table_step.setter
    def table_step(self, steps: int) -> None:
        for optimizer in self.table.optimizers.values():
            optimizer.steps = steps


def _describe(table: HandrolledTable, tables: Sequence[EntityTable]) -> str:
    """Describe the rows and bytes of every rank in readable text."""
    ranges, rows = table.ranges, table.shard().rows
    row_bytes = {
        name: rows.shape[1] * rows.element_size()
        + sum(s.element_size() * s[:1].numel() for s in optimizer.states.values())
        for name, optimizer in table.optimizers.items()
    }
    lines = []
    for own in tables:
        name = f"entities.embeddings.{own.name}.weight"
        lines.append(f"{name}: row_wise, hand-rolled, {ranges.world_size} shards")
        for rank in range(ranges.world_size):
            start, stop = ranges.range_of(rank)
            count = len(own.within(start, stop))
            first = max(start, own.ids.start) - own.ids.start
            size = count * row_bytes[own.name]
            lines.append(
                f"  rank {rank}: rows {first:,} to {first + count:,} x {rows.shape[1]}, "
                f"{size / 2**20:,.2f} MiB"
            )
    return "\n".join(lines)
