"""How the dense parameters (relations and other scorer parameters) are kept equal on all ranks."""

from __future__ import annotations

import torch
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.distributed.types import ShardingEnv


class NoWrapper(DataParallelWrapper):
    """World size 1: nothing to keep equal."""

    def wrap(self, dmp, env: ShardingEnv, device: torch.device) -> None:
        """Leaves the model as it is."""


def dense_wrapper(world_size: int) -> DataParallelWrapper:
    """The wrapper that DistributedModelParallel applies: none alone, DDP among several."""
    return NoWrapper() if world_size == 1 else DefaultDataParallelWrapper()
