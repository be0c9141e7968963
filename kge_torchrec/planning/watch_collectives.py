"""What collectives really carry: bytes that this rank sends, counted as they pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class WatchCollectives(TorchDispatchMode):
    """Counts inside its block, on the thread that trains; DDP's own collectives pass by as well.

    sent: bytes by the planner's kinds, without what the rank keeps for itself.  All-to-alls of
    int64 are ids; of float32, gradients in backward and rows else.  An all-reduce counts as a
    ring: 2 (W - 1) / W of its size.

    Raises NotImplementedError for a collective that a training step does not use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = dict.fromkeys(("ids", "rows", "gradients", "dense"), 0.0)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self._count(operation.overloadpacket, args)
        return operation(*args, **(kwargs or {}))

    def _count(self, operation, args) -> None:
        if operation is torch.ops.c10d.alltoall_base_:
            sent, splits = args[1], args[4]
            if sent.dtype == torch.int64:
                self.sent["ids"] += self._others(sent, splits)
            else:
                backward = torch._C._current_autograd_node() is not None
                self.sent["gradients" if backward else "rows"] += self._others(sent, splits)
        elif operation is torch.ops.c10d.allreduce_:
            size = sum(tensor.numel() * tensor.element_size() for tensor in args[0])
            self.sent["dense"] += 2 * (self._world - 1) / self._world * size
        elif operation is not torch.ops.c10d.barrier:
            raise NotImplementedError(f"{operation} is not counted")

    def _others(self, sent: Tensor, splits: list[int]) -> int:
        """Bytes of an all-to-all's input that go to other ranks."""
        if not sent.numel():
            return 0
        share = 1 - splits[self._rank] / sum(splits) if splits else 1 - 1 / self._world
        return round(share * sent.numel()) * sent.element_size()
