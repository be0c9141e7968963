"""The bytes that a rank sends in a step, counted as collectives run: what a plan must predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode


class WatchCollectives(TorchDispatchMode):
    """Counts bytes in its block, on the thread that trains; it sees DDP's own collectives as well.

    sent: bytes by the planner's kinds, without what the rank keeps for itself.  All-to-alls of
    int64 are ids; of float32, gradients in backward and rows else.  Other collectives count as
    rings: an all-reduce of n ranks sends 2 (n - 1) / n of its size, an all-gather or a
    reduce-scatter half of that.

    Raises NotImplementedError for a collective that a training step does not use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = dict.fromkeys(("ids", "rows", "gradients", "dense"), 0.0)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if operation.namespace == "c10d":
            self._count(operation.overloadpacket, args)
        return operation(*args, **(kwargs or {}))

    def _count(self, operation: OpOverloadPacket, args: tuple[Any, ...]) -> None:
        if operation is torch.ops.c10d.alltoall_base_:
            sent, splits = args[1], args[4]
            self._count_rows(sent, self._others(sent, splits))
        elif operation is torch.ops.c10d.send:
            self._count_rows(args[0][0], args[0][0].nbytes)
        elif operation is torch.ops.c10d.allreduce_:
            size = sum(tensor.numel() * tensor.element_size() for tensor in args[0])
            self._ring(2, size, args[1])
        elif operation is torch.ops.c10d.allgather_:
            gathered = args[0][0]
            size = sum(tensor.numel() * tensor.element_size() for tensor in gathered)
            self._ring(1, size, args[2])
        elif operation is torch.ops.c10d._allgather_base_:
            self._ring(1, args[0].numel() * args[0].element_size(), args[2])
        elif operation is torch.ops.c10d._reduce_scatter_base_:
            self._ring(1, args[1].numel() * args[1].element_size(), args[2])
        elif operation is not torch.ops.c10d.barrier and operation is not torch.ops.c10d.recv_:
            raise NotImplementedError(f"{operation} is not counted")

    def _count_rows(self, rows: Tensor, size: int) -> None:
        """Count bytes of ids, rows or gradients that go to other ranks."""
        backward = torch._C._current_autograd_node() is not None
        kind = "ids" if rows.dtype == torch.int64 else "gradients" if backward else "rows"
        self.sent[kind] += size

    def _ring(self, rounds: int, size: int, group: torch.ScriptObject) -> None:
        """``rounds`` times n - 1 of n parts of ``size`` bytes, over n ranks."""
        count = dist.ProcessGroup.unbox(group).size()
        self.sent["dense"] += rounds * (count - 1) / count * size

    def _others(self, sent: Tensor, splits: list[int]) -> int:
        """Bytes of an all-to-all's input that go to other ranks."""
        if not sent.numel():
            return 0
        share = 1 - splits[self._rank] / sum(splits) if splits else 1 - 1 / self._world
        return round(share * sent.numel()) * sent.element_size()
