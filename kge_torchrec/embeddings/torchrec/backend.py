"""The TorchRec engine: table, scorer and optimizers put together, ready to train.

Order matters, as in TorchRec's own examples: a table on the meta device, its plan,
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

from kge_torchrec.data.batches.queries import SampledBatch
from kge_torchrec.distributed.dense import DenseWrapper, FrozenDense, start_optimizer_state
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.init import EntityInit, fill_rows
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.pending import RowGradients
from kge_torchrec.embeddings.torchrec.collection import (
    entity_collection,
    entity_shard,
    pending_gradients,
    set_table_step,
    step_table_rows,
    table_step,
)
from kge_torchrec.embeddings.torchrec.planner import describe_plan, plan_row_wise
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder, fused_params
from kge_torchrec.models.model import KGEModel, Objective

DenseOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class _Wrap(DataParallelWrapper):
    """A wrapper of the dense parameters as DistributedModelParallel asks for it.

    It is put around the model once the table in it is sharded.
    """

    def __init__(self, wrapper: DenseWrapper):
        self._wrapper = wrapper

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        dmp._dmp_wrapped_module = self._wrapper.wrap(dmp._dmp_wrapped_module)


def _gains_by_pipeline(processes: Processes) -> bool:
    """Whether TorchRec's pipeline overlaps more than it costs.

    A single rank sends nothing, and ranks on the CPU of one host pass ids through memory: there
    the pipeline's own work takes more time than there is to overlap.
    """
    several_hosts = processes.world_size > processes.local_world_size
    return several_hosts or (processes.world_size > 1 and processes.device.type != "cpu")


class TorchRecBackend:
    """Entities in a row-wise sharded EmbeddingCollection with a fused optimizer.

    On CUDA that is FBGEMM's kernel, which steps in backward unless it is deferred; the CPU table
    steps with the dense parameters.  Without a plan the planner is asked for one.  Collective:
    every rank builds it with the same arguments.  Raises PlanDoesNotFit when the table does not
    fit the ranks' memory.

    ascending_ids: every batch asks for distinct ids in ascending order.
    deferred: gradients of several backward passes, or clipped ones, step as one.
    """

    def __init__(
        self,
        num_entities: int,
        objective: Objective,
        table_optimizer: TableOptimizer,
        dense_optimizer: DenseOptimizer,
        processes: Processes,
        *,
        dense: DenseWrapper,
        init: EntityInit,
        seed: int,
        scales_loss: bool = False,
        plan: ShardingPlan | None = None,
        ascending_ids: bool = False,
        deferred: bool = False,
    ):
        device = processes.device
        self.gains_by_pipeline = _gains_by_pipeline(processes)
        collection = entity_collection(num_entities, objective.scorer.dim)
        model = KGEModel(collection, objective.to(device), scales_loss)
        settings = fused_params(table_optimizer, ascending_ids=ascending_ids, deferred=deferred)
        sharder = EntitySharder(fused_params=settings)
        self.plan: ShardingPlan = plan or plan_row_wise(
            model,
            sharder,
            processes.world_size,
            processes.local_world_size,
            device.type,
            process_group=processes.group,
        )
        env = ShardingEnv(
            processes.world_size, processes.rank, processes.exchange, output_dtensor=True
        )
        # Beside NCCL there is gloo for objects, which TorchRec takes the mesh's device from.
        env.device_mesh = DeviceMesh.from_group(processes.group, device.type)
        self.model = DistributedModelParallel(
            model,
            env=env,
            device=device,
            plan=self.plan,
            sharders=[sharder],
            data_parallel_wrapper=_Wrap(dense),
        )
        self.unwrapped_model = next(m for m in self.model.modules() if isinstance(m, KGEModel))
        self.scorer = self.unwrapped_model.objective.scorer
        # Where the table is looked for, in every step, among few modules.
        self._sharded = next(
            m for m in self.model.modules() if isinstance(m, ShardedEmbeddingCollection)
        )
        self.dense, self.pending = dense, pending_gradients(self._sharded)
        self.layout = f"{describe_plan(self.plan, sharder)}\n{dense.describe()}"
        fill_rows(self.shard(), seed, init)
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self._dense = KeyedOptimizerWrapper(parameters, dense_optimizer)
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, self._dense])
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]

    def shard(self) -> EntityShard:
        """This rank's rows, current as of the last finished step."""
        return entity_shard(self._sharded)

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """One step of the table's optimizer on rows of this rank, without a lookup."""
        step_table_rows(self._sharded, gradients)

    def freeze_rows(self, frozen: Tensor) -> None:
        """No step moves these rows of this rank, (n,) bool, or their state from here on."""
        assert self.pending is not None  # as Config.freezes
        self.pending.frozen = frozen.to(self.shard().rows.device)

    def freeze_dense(self, frozen: dict[str, Tensor]) -> None:
        """No step moves these rows of the objective's parameters, by name, or their state."""
        self.dense.frozen = FrozenDense(self.dense, self._dense, frozen)

    def set_learning_rate(self, factor: float) -> None:
        """Multiplies the base learning rates; the table's kernel takes it at the next zero_grad."""
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def skip_step(self) -> None:
        """FBGEMM's kernel has counted the lookup as a step, unless it counts none; take it back."""
        if self.pending is None:
            set_table_step(self._sharded, max(0, table_step(self._sharded) - 1))

    def prepare(self, batch: SampledBatch) -> SampledBatch:
        """Nothing: TorchRec distributes the ids on the device."""
        return batch

    def parameter_state(self) -> dict[str, Any]:
        """The parameters for a distributed checkpoint."""
        return self.model.state_dict()

    def load_parameter_state(self, state: dict[str, Any]) -> None:
        """Takes back what ``parameter_state`` gave."""
        self.model.load_state_dict(state)

    def state(self) -> dict[str, Any]:
        """Table, scorer and optimizer state for a distributed checkpoint."""
        start_optimizer_state(self._dense)
        return {
            "model": self.parameter_state(),
            "optimizer": self.optimizer.state_dict(),
            "table_step": torch.tensor(table_step(self._sharded)),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what ``state`` gave, once a distributed load has filled it in."""
        self.load_parameter_state(state["model"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # the schedule sets it, from config and step
        # The iteration that FBGEMM corrects the Adams' bias with is in no state_dict.
        set_table_step(self._sharded, int(state["table_step"]))
