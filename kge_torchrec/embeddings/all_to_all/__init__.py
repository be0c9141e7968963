"""The hand-rolled backend: the same model as with TorchRec, with its own table and exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kge_torchrec.config import Config
from kge_torchrec.data.batches.queries import SampledBatch
from kge_torchrec.distributed.dense import FrozenDense, dense_wrapper, start_optimizer_state
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.all_to_all.table import HandrolledTable
from kge_torchrec.embeddings.backend import ENTITY, ENTITY_WEIGHT, EntityShard
from kge_torchrec.embeddings.chunks import row_sharded
from kge_torchrec.embeddings.init import EntityInit, fill_rows
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import RowGradients
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

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state by parameter name: tensors that a load may fill in place."""
        return {n: dict(self.state[p]) for n, p in self._parameters.items() if p in self.state}

    def load(self, states: dict[str, dict[str, Any]]) -> None:
        """Load the result of ``states`` after its tensors were filled."""
        for name, values in states.items():
            self.state[self._parameters[name]].update(values)


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
        num_entities: N.
        objective: Scorer and loss.
        table_optimizer: Optimizer of the table.
        dense_optimizer: Builds the optimizer of the dense parameters.
        processes: The ranks of the run.
    """

    gains_by_pipeline = False

    def __init__(
        self,
        config: Config,
        num_entities: int,
        objective: Objective,
        table_optimizer: TableOptimizer,
        dense_optimizer: DenseOptimizer,
        processes: Processes,
    ):
        self.dense = dense_wrapper(config.dense, processes)
        options = config.entities.sparse_options(config.train.optimizer)
        self.table = HandrolledTable(
            num_entities, objective.scorer.dim, table_optimizer, options, processes
        )
        init = EntityInit.of(config.model, objective.scorer.zero_columns)
        fill_rows(self.shard(), config.seed, init)
        objective = objective.to(processes.device)
        self.unwrapped_model = KGEModel(self.table, objective, config.train.precision == "fp16")
        self.scorer = objective.scorer
        self.pending = self.table.pending
        self.model = self.dense.wrap(self.unwrapped_model)
        parameters = dict(self.unwrapped_model.named_parameters())
        self._dense = _NamedOptimizer(parameters, dense_optimizer)
        self.optimizer = _StepBoth(self.table, self._dense)
        self._base_rates = [group["lr"] for group in self._dense.param_groups]
        self._base_table_rate = table_optimizer.lr
        self.layout = f"{_describe(self.table)}\n{self.dense.describe()}"

    def prepare(self, batch: SampledBatch) -> SampledBatch:
        """Replace the ids by their route while they are on the host.  Collective."""
        return replace(batch, ids=self.table.route(batch))

    def shard(self) -> EntityShard:
        """Return this rank's rows after the last finished step."""
        return self.table.shard()

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """Take one step of the table's optimizer on rows of this rank, without a lookup."""
        self.table.step_rows(gradients)

    def freeze_rows(self, frozen: Tensor) -> None:
        """Freeze rows of this rank, (n,) bool, and their optimizer state."""
        assert self.pending is not None  # as Config.freezes
        self.pending.frozen = frozen.to(self.shard().rows.device)

    def freeze_dense(self, frozen: dict[str, Tensor]) -> None:
        """Freeze rows of the objective's parameters, (rows,) bool by name, and their state."""
        self.dense.frozen = FrozenDense(self.dense, self._dense, frozen)

    def set_learning_rate(self, factor: float) -> None:
        """Multiply the base learning rates of all later steps."""
        self.table.lr = self._base_table_rate * factor
        for group, base in zip(self._dense.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def skip_step(self) -> None:
        """Do nothing: the table counts only steps that were taken."""

    def parameter_state(self) -> dict[str, Any]:
        """Return the parameters for a distributed checkpoint."""
        return {
            ENTITY_WEIGHT: self._sharded(self.shard().rows),
            **self.unwrapped_model.state_dict(),
        }

    def load_parameter_state(self, state: dict[str, Any]) -> None:
        """Load the result of ``parameter_state``.  The rows were already filled in place."""
        dense = {name: value for name, value in state.items() if name != ENTITY_WEIGHT}
        self.unwrapped_model.load_state_dict(dense)

    def state(self) -> dict[str, Any]:
        """Return table, scorer and optimizer state for a distributed checkpoint."""
        start_optimizer_state(self._dense)
        table = {
            f"{ENTITY}.{name}": self._sharded(state)
            for name, state in self.table.optimizer.states.items()
        }
        return {
            "model": self.parameter_state(),
            "optimizer": {"state": {ENTITY_WEIGHT: table, **self._dense.states()}},
            "table_step": self._steps(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the result of ``state`` after a distributed load filled it in place."""
        self.load_parameter_state(state["model"])
        dense = {k: v for k, v in state["optimizer"]["state"].items() if k != ENTITY_WEIGHT}
        self._dense.load(dense)
        self.table.optimizer.steps = int(state["table_step"])

    def _steps(self) -> Tensor:
        """Return the step count; with ``bias_correction: shard`` the largest of all shards."""
        steps = torch.tensor(self.table.optimizer.steps)
        if self.table.ranges.world_size > 1:
            dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=self.table.group)
        return steps

    def _sharded(self, local: Tensor) -> DTensor:
        shard = self.shard()
        return row_sharded(local, shard.first_row, shard.num_entities, self.table.group)


def _describe(table: HandrolledTable) -> str:
    """Describe the rows and bytes of every rank in readable text."""
    ranges, rows = table.ranges, table.shard().rows
    state = sum(s.element_size() * s[:1].numel() for s in table.optimizer.states.values())
    lines = [f"{ENTITY_WEIGHT}: row_wise, hand-rolled, {ranges.world_size} shards"]
    for rank in range(ranges.world_size):
        start, stop = ranges.range_of(rank)
        size = (stop - start) * (rows.shape[1] * rows.element_size() + state)
        lines.append(
            f"  rank {rank}: rows {start:,} to {stop:,} x {rows.shape[1]}, {size / 2**20:,.2f} MiB"
        )
    return "\n".join(lines)
