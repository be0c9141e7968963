"""The TorchRec backend: table, scorer and optimizers, ready to train.

The order of construction matters and follows TorchRec's examples: table on the meta device, plan,
DistributedModelParallel, initial values, optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.types import (
    CommOp,
    QuantizedCommCodec,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.streamable import Pipelineable as TorchRecPipelineable

from kge_torchrec.config import Config
from kge_torchrec.data.batches import Pipelineable
from kge_torchrec.distributed.dense import DenseWrapper, dense_wrapper
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.embeddings.backend import EmbeddingBackend, StepBoth
from kge_torchrec.embeddings.exchange import GRADIENT_SCALE, packed, unpacked
from kge_torchrec.embeddings.shard import EntityTable, describe_rows
from kge_torchrec.embeddings.torchrec.collection import (
    FbgemmShard,
    as_feature,
    entity_collection,
    kernel_of,
    table_of,
)
from kge_torchrec.embeddings.torchrec.planner import FUSED, UVM_CACHING, Ranks, plan_rows
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder, fused_params
from kge_torchrec.models.model import KGEModel, Objective

TorchRecPipelineable.register(Pipelineable)  # its pipeline takes no other batches
DenseOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class _Wrap(DataParallelWrapper):
    """Adapts a DenseWrapper to DistributedModelParallel, which calls it after sharding."""

    def __init__(self, wrapper: DenseWrapper):
        self._wrapper = wrapper

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        dmp._dmp_wrapped_module = self._wrapper.wrap(dmp._dmp_wrapped_module)


class TorchRecBackend(EmbeddingBackend):
    """A backend with the entities in a row-wise sharded EmbeddingCollection.

    On CUDA, FBGEMM's fused optimizer steps in backward, unless a step needs the sum of several
    gradients, rows are frozen or there are several tables.  CPU tables step together with the
    dense parameters.

    Raises:
        PlanDoesNotFit: The table does not fit into the memory of the ranks.
    """

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
        self.dense = dense_wrapper(config.dense, processes)
        self.gains_by_pipeline = processes.world_size > 1  # a single rank sends nothing
        collection = entity_collection(tables[-1].ids.stop, dim)
        model = KGEModel(collection, objective.to(device), config.train.precision == "fp16")
        sharder = EntitySharder(
            fused_params(tables, config.train.steps_on_sums or config.freezes),
            exchange_codecs(config.entities.exchange.dtype, dim, device),
        )
        ranks = Ranks(processes.world_size, processes.local_world_size, device.type)
        plan: ShardingPlan = on_first_rank(
            processes, lambda: plan_rows(collection, sharder, tables, ranks, **plan_options(config))
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
            plan=plan,
            sharders=[sharder],
            data_parallel_wrapper=_Wrap(self.dense),
        )
        self.unwrapped_model = next(m for m in self.model.modules() if isinstance(m, KGEModel))
        self.scorer = self.unwrapped_model.objective.scorer
        self.table = table_of(self.model, tables)
        steps_in_backward = isinstance(self.table, FbgemmShard) and not self.table.is_deferred
        self.pending = None if steps_in_backward else self.table
        kernel, cached = plan_options(config).get("kernel", FUSED), config.entities.cache_ratio
        place = f", {cached:.3g} of them cached on the GPU" if cached else ""
        rows = describe_rows(tables, processes.world_size, dim, f"kernel {kernel}{place}")
        self.layout = f"{rows}\ndense parameters: {self.dense.title}"
        self.fill_rows(config.seed)
        self.dense_optimizer = dense_optimizer(list(self.unwrapped_model.objective.parameters()))
        self.optimizer = StepBoth(kernel_of(self.model).fused_optimizer, self.dense_optimizer)

    def skip_step(self) -> None:
        """Discard a step: undo the step count of FBGEMM's kernel, which counts every lookup."""
        if self.pending is None:
            self.table.steps = max(0, self.table.steps - 1)


def plan_options(config: Config) -> dict[str, Any]:
    """Return the options of ``plan_rows`` that the config names."""
    ratio = config.entities.cache_ratio
    where = {"kernel": UVM_CACHING, "cache_ratio": ratio} if ratio else {}
    return {"averages": config.train.averages, **where}


def exchange_codecs(
    dtype: str, dim: int, device: torch.device
) -> dict[str, QuantizedCommCodecs] | None:
    """Return how TorchRec packs rows on their way; None for float32.

    TorchRec's own codecs of 16 bits have no bf16 on CPUs, and its int8 codec needs a GPU.
    """
    if dtype == "fp32":
        return None
    operation = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    if device.type == "cpu":
        return {operation.name: QuantizedCommCodecs(_Rows(dtype, dim), _Rows(dtype, dim, True))}
    precision, scale = CommType(dtype), GRADIENT_SCALE if dtype == "fp16" else None
    config = QCommsConfig(precision, precision, backward_loss_scale=scale)
    return get_qcomm_codecs_registry(config, [operation], device)


class _Rows(QuantizedCommCodec[None]):
    """Packs rows for TorchRec's exchange in the formats of the hand-rolled engine.

    TorchRec passes flat tensors, whole rows of D elements.
    """

    quantized_dtype = torch.uint8

    def __init__(self, dtype: str, dim: int, gradients: bool = False):
        self._dtype, self._dim, self._gradients = dtype, dim, gradients
        self._row_bytes = packed(torch.zeros(1, dim), dtype).numel()

    def encode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:
        rows = input_tensor.reshape(-1, self._dim)
        return packed(rows, self._dtype, self._gradients).view(-1)

    def decode(self, input_grad: Tensor, ctx: None = None) -> Tensor:
        data = input_grad.view(-1, self._row_bytes)
        return unpacked(data, self._dtype, self._dim, self._gradients).reshape(-1)

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        return input_len // self._dim * self._row_bytes

    def create_context(self) -> None:
        return None
