"""How the dense parameters (relations and other scorer parameters) are kept equal on all ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import KeyedOptimizerWrapper

from kge_torchrec.parallel.processes import Processes


class NoWrapper(DataParallelWrapper):
    """World size 1: nothing to keep equal."""

    def wrap(self, dmp, env: ShardingEnv, device: torch.device) -> None:
        """Leaves the model as it is."""


def dense_wrapper(world_size: int) -> DataParallelWrapper:
    """The wrapper that DistributedModelParallel applies: none alone, DDP among several."""
    return NoWrapper() if world_size == 1 else DefaultDataParallelWrapper()


def replicate(model: nn.Module, processes: Processes) -> nn.Module:
    """The same for a model outside DistributedModelParallel."""
    if processes.world_size == 1:
        return model
    devices = None if processes.device.type == "cpu" else [processes.device]
    return DistributedDataParallel(
        model,
        device_ids=devices,
        process_group=processes.group,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )


@torch.no_grad()
def start_optimizer_state(optimizer: KeyedOptimizerWrapper) -> None:
    """Makes a dense optimizer's state as it is before the first step, unless it exists.

    A checkpoint can only fill in state that exists.  TorchRec makes it by a step with zero
    gradients, which moves what weight decay or momentum moves and counts as a step: both are taken
    back.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(optimizer.state.get(p) for p in parameters):
        return
    before = [p.clone() for p in parameters]
    optimizer.init_state()
    optimizer.zero_grad()
    for parameter, values in zip(parameters, before, strict=True):
        parameter.copy_(values)
        for state in optimizer.state.get(parameter, {}).values():
            state.zero_()
