"""The TorchRec backend: table, scorer and optimizers, ready to train.

The order of construction matters and follows TorchRec's examples: table on the meta device, plan,
DistributedModelParallel, initial values, optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.types import (
    CommOp,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable as TorchRecPipelineable

from kge_torchrec.config import Config
from kge_torchrec.data.batches import Pipelineable
from kge_torchrec.distributed.dense import DenseWrapper, dense_wrapper
from kge_torchrec.distributed.processes import Processes, Rows, on_first_rank, rows_by_rank
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.exchange import GRADIENT_SCALE
from kge_torchrec.embeddings.init import fill_rows, zeros_on_huge_pages
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.tables import EntityTable, block_of, rows_of_tables
from kge_torchrec.embeddings.torchrec.blocks import plan_tables
from kge_torchrec.embeddings.torchrec.collection import (
    entity_collection,
    entity_shard,
    gradient_block,
    set_table_step,
    step_table_rows,
    table_states,
    table_step,
)
from kge_torchrec.embeddings.torchrec.feature import as_feature
from kge_torchrec.embeddings.torchrec.planner import UVM_CACHING, Ranks, describe_plan
from kge_torchrec.embeddings.torchrec.settings import fused_params, several_tables
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder
from kge_torchrec.models.model import KGEModel, Objective

TorchRecPipelineable.register(Pipelineable)  # its pipeline takes no other batches
DenseOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class _Wrap(DataParallelWrapper):
    """Adapts a DenseWrapper to DistributedModelParallel, which calls it after sharding."""

    def __init__(self, wrapper: DenseWrapper):
        self._wrapper = wrapper

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        dmp._dmp_wrapped_module = self._wrapper.wrap(dmp._dmp_wrapped_module)


def _gains_by_pipeline(processes: Processes) -> bool:
    """Return whether TorchRec's pipeline saves more time than it costs.

    A single rank sends nothing, and CPU ranks of one host exchange ids quickly.  In these cases the
    overhead of the pipeline is larger than the time it can overlap.
    """
    several_hosts = processes.world_size > processes.local_world_size
    return several_hosts or (processes.world_size > 1 and processes.device.type != "cpu")


class TorchRecBackend:
    """A backend with the entities in a row-wise sharded EmbeddingCollection.

    On CUDA, FBGEMM's fused optimizer steps in backward, unless a step needs the sum of several
    gradients, rows are frozen or there are several tables.  CPU tables step together with the
    dense parameters.
    Collective: every rank builds it with the same arguments.

    Args:
        config: The config of the run.
        tables: The entity tables.
        objective: Scorer and loss.
        dense_optimizer: Builds the optimizer of the dense parameters.
        processes: The ranks of the run.

    Raises:
        PlanDoesNotFit: The table does not fit into the memory of the ranks.
    """

    prepare = None  # TorchRec distributes the ids on the device

    def __init__(
        self,
        config: Config,
        tables: Sequence[EntityTable],
        objective: Objective,
        dense_optimizer: DenseOptimizer,
        processes: Processes,
    ):
        device, dim = processes.device, objective.scorer.row_dim
        as_feature(torch.empty(0, dtype=torch.int64))  # the first call prints a notice of torch.fx
        self.tables = tables
        self.dense = dense_wrapper(config.dense, processes)
        self.gains_by_pipeline = _gains_by_pipeline(processes)
        collection = entity_collection({table.name: len(table.ids) for table in tables}, dim)
        model = KGEModel(collection, objective.to(device), config.train.precision == "fp16")
        settings = _settings(config, tables, dim, processes)
        sharder = EntitySharder(
            fused_params=settings,
            qcomm_codecs_registry=_codecs(config.entities.traffic.dtype, device),
        )
        ranks = Ranks(processes.world_size, processes.local_world_size, device.type)
        self.plan: ShardingPlan = on_first_rank(
            processes,
            lambda: plan_tables(model, sharder, ranks, tables, dim, **_plan_options(config)),
        )
        env = ShardingEnv(
            processes.world_size, processes.rank, processes.group, output_dtensor=True
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
        self.pending = gradient_block(self._sharded)
        self.layout = f"{describe_plan(self.plan, sharder)}\n{self.dense.describe()}"
        for table in tables:
            fill_rows(self.shard(), config.seed, table.init, table.ids)
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense_optimizer = KeyedOptimizerWrapper(parameters, dense_optimizer)
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, self.dense_optimizer])
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]

    def shard(self) -> EntityShard:
        """Return this rank's rows after the last finished step."""
        return entity_shard(self._sharded)

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """Take one step of the table's optimizer on rows of this rank, without a lookup."""
        step_table_rows(self._sharded, gradients)

    def set_learning_rate(self, factor: float) -> None:
        """Multiply the base learning rates; the table's kernel gets them in the next zero_grad."""
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def skip_step(self) -> None:
        """Discard a step: undo the step count of FBGEMM's kernel, which counts every lookup."""
        if self.pending is None:
            self.table_step = max(0, self.table_step - 1)

    def state(self) -> list[Rows]:
        """Return this rank's rows of table, scorer and optimizer state."""
        states = table_states(self._sharded)
        return [
            *rows_of_tables(self.tables, states, self.shard()),
            *self.dense.state(self.dense_optimizer),
        ]

    @property
    def table_step(self) -> int:
        """The number of steps of the table's optimizer; FBGEMM corrects Adam's bias by it."""
        return table_step(self._sharded)

    @table_step.setter
    def table_step(self, steps: int) -> None:
        set_table_step(self._sharded, steps)


def _plan_options(config: Config) -> dict[str, Any]:
    """Return the options of the plan that TorchRec's planner makes."""
    ratio = config.entities.cache_ratio
    where = {"kernel": UVM_CACHING, "cache_ratio": ratio} if ratio else {}
    return {"averages": config.train.averages, **where}


def _codecs(dtype: str, device: torch.device) -> dict[str, QuantizedCommCodecs] | None:
    """Return how TorchRec's own exchange on CUDA packs rows; None for float32.

    On a CPU `embeddings.exchange` packs them.
    """
    if device.type == "cpu":
        return None
    precision, scale = CommType(dtype), GRADIENT_SCALE if dtype == "fp16" else None
    config = QCommsConfig(precision, precision, backward_loss_scale=scale)
    return get_qcomm_codecs_registry(config, [CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL], device)


def _settings(
    config: Config, tables: Sequence[EntityTable], dim: int, processes: Processes
) -> dict[str, Any]:
    """Return the settings of all tables for the sharder, ``fused_params``."""
    several = len(tables) > 1
    deferred = config.train.steps_on_sums or config.freezes or several
    by_table = {
        table.name: fused_params(
            table.optimizer,
            ascending_ids=True,
            deferred=deferred,
            exchange_dtype=config.entities.traffic.dtype,
        )
        for table in tables
    }
    if not several:
        return by_table[tables[0].name]
    rows = rows_by_rank(tables[-1].ids.stop, processes.world_size)[processes.rank]
    memory = zeros_on_huge_pages(len(rows), dim, device=processes.device)
    return several_tables(by_table, block_of(tables, memory, rows.start))
