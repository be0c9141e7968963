"""The TorchRec backend: table, scorer and optimizers, ready to train.

The order of construction matters and follows TorchRec's examples: table on the meta device, plan,
DistributedModelParallel, initial values, optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from kge_torchrec.config import Config
from kge_torchrec.data.batches.queries import SampledBatch
from kge_torchrec.distributed.dense import (
    DenseWrapper,
    FrozenDense,
    dense_wrapper,
    start_optimizer_state,
)
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.init import EntityInit, fill_rows
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.torchrec.collection import (
    entity_collection,
    entity_shard,
    fused_params,
    pending_gradients,
    set_table_step,
    step_table_rows,
    table_step,
)
from kge_torchrec.embeddings.torchrec.planned import planned_sharding
from kge_torchrec.embeddings.torchrec.planner import Ranks, describe_plan, plan_row_wise
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder
from kge_torchrec.models.model import KGEModel, Objective

DenseOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class _Wrap(DataParallelWrapper):
    """Adapts a DenseWrapper to DistributedModelParallel, which calls it after sharding."""

    def __init__(self, wrapper: DenseWrapper):
        self._wrapper = wrapper

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        dmp._dmp_wrapped_module = self._wrapper.wrap(dmp._dmp_wrapped_module)


def _gains_by_pipeline(processes: Processes) -> bool:
    """Return whether TorchRec's pipeline saves more time than it costs.

    A single rank sends nothing, and CPU ranks of one host exchange ids through shared memory.  In
    these cases the overhead of the pipeline is larger than the time it can overlap.
    """
    several_hosts = processes.world_size > processes.local_world_size
    return several_hosts or (processes.world_size > 1 and processes.device.type != "cpu")


class TorchRecBackend:
    """A backend with the entities in a row-wise sharded EmbeddingCollection.

    On CUDA, FBGEMM's fused optimizer steps in backward, unless a step needs the sum of several
    gradients or rows are frozen.  The CPU table steps together with the dense parameters.
    Collective: every rank builds it with the same arguments.

    Args:
        config: The config of the run.
        num_entities: N.
        objective: Scorer and loss.
        table_optimizer: Optimizer of the table.
        dense_optimizer: Builds the optimizer of the dense parameters.
        processes: The ranks of the run.

    Raises:
        ConfigError: The plan run.plan is for another run.
        PlanDoesNotFit: The table does not fit into the memory of the ranks.
    """

    def __init__(
        self,
        config: Config,
        num_entities: int,
        objective: Objective,
        table_optimizer: TableOptimizer,
        dense_optimizer: DenseOptimizer,
        processes: Processes,
    ):
        device = processes.device
        self.dense = dense_wrapper(config.dense, processes)
        plan = planned_sharding(config, num_entities, processes)
        self.gains_by_pipeline = _gains_by_pipeline(processes)
        collection = entity_collection(num_entities, objective.scorer.dim)
        model = KGEModel(collection, objective.to(device), config.train.precision == "fp16")
        settings = fused_params(
            table_optimizer,
            ascending_ids=config.entities.deduplicate,
            deferred=config.train.steps_on_sums or config.freezes,
        )
        sharder = EntitySharder(fused_params=settings)
        ranks = Ranks(processes.world_size, processes.local_world_size, device.type)
        averages = config.train.averages
        self.plan: ShardingPlan = plan or on_first_rank(
            processes, lambda: plan_row_wise(model, sharder, ranks, averages=averages)
        )
        env = ShardingEnv(
            processes.world_size, processes.rank, processes.exchange, output_dtensor=True
        )
        # Set the mesh explicitly: the group also has gloo (for objects), and TorchRec would take
        # the device of the mesh from it.
        env.device_mesh = DeviceMesh.from_group(processes.group, device.type)
        self.model = DistributedModelParallel(
            model,
            env=env,
            device=device,
            plan=self.plan,
            sharders=[sharder],
            data_parallel_wrapper=_Wrap(self.dense),
        )
        self.unwrapped_model = next(m for m in self.model.modules() if isinstance(m, KGEModel))
        self.scorer = self.unwrapped_model.objective.scorer
        # Every step searches for the table; searching this module is faster than the whole model.
        self._sharded = next(
            m for m in self.model.modules() if isinstance(m, ShardedEmbeddingCollection)
        )
        self.pending = pending_gradients(self._sharded)
        self.layout = f"{describe_plan(self.plan, sharder)}\n{self.dense.describe()}"
        init = EntityInit.of(config.model, self.scorer.zero_columns)
        fill_rows(self.shard(), config.seed, init)
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self._dense = KeyedOptimizerWrapper(parameters, dense_optimizer)
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, self._dense])
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]

    def shard(self) -> EntityShard:
        """Return this rank's rows after the last finished step."""
        return entity_shard(self._sharded)

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """Take one step of the table's optimizer on rows of this rank, without a lookup."""
        step_table_rows(self._sharded, gradients)

    def freeze_rows(self, frozen: Tensor) -> None:
        """Freeze rows of this rank, (n,) bool, and their optimizer state."""
        assert self.pending is not None  # as Config.freezes
        self.pending.frozen = frozen.to(self.shard().rows.device)

    def freeze_dense(self, frozen: dict[str, Tensor]) -> None:
        """Freeze rows of the objective's parameters, (rows,) bool by name, and their state."""
        self.dense.frozen = FrozenDense(self.dense, self._dense, frozen)

    def set_learning_rate(self, factor: float) -> None:
        """Multiply the base learning rates; the table's kernel gets them in the next zero_grad."""
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def skip_step(self) -> None:
        """Discard a step: undo the step count of FBGEMM's kernel, which counts every lookup."""
        if self.pending is None:
            set_table_step(self._sharded, max(0, table_step(self._sharded) - 1))

    def prepare(self, batch: SampledBatch) -> SampledBatch:
        """Do nothing: TorchRec distributes the ids on the device."""
        return batch

    def parameter_state(self) -> dict[str, Any]:
        """Return the parameters for a distributed checkpoint."""
        return self.model.state_dict()

    def load_parameter_state(self, state: dict[str, Any]) -> None:
        """Load the result of ``parameter_state``."""
        self.model.load_state_dict(state)

    def state(self) -> dict[str, Any]:
        """Return table, scorer and optimizer state for a distributed checkpoint."""
        start_optimizer_state(self._dense)
        return {
            "model": self.parameter_state(),
            "optimizer": self.optimizer.state_dict(),
            "table_step": torch.tensor(table_step(self._sharded)),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the result of ``state`` after a distributed load filled it in place."""
        self.load_parameter_state(state["model"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # the schedule computes the rate from config and step
        # No state_dict holds the iteration that FBGEMM uses for the bias correction of Adam.
        set_table_step(self._sharded, int(state["table_step"]))
