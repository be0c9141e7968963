"""Traffic: the collectives of a rank, and what it sends to other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMES = {
    "alltoall_base_": "all_to_all", "allreduce_": "all_reduce", "allgather_": "all_gather",
    "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
}  # fmt: skip
# Rounds of a ring, and the places of its whole tensors and of its group among the arguments.
_RINGS = {
    "allreduce_": (2, 0, 1), "allgather_": (1, 0, 2), "_allgather_base_": (1, 0, 2),
    "_reduce_scatter_base_": (1, 1, 2),
}  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts this rank's collectives and messages while entered, those of backward and of DDP too.

    Attributes:
        collectives: Number per kind; a message to another rank is a "send".
        sent: Bytes by the kinds of a plan, without what the rank keeps for itself. All-to-alls and
            messages of integers are ids, others gradients in backward and rows else. Other
            collectives are dense and count as rings: an all-reduce of n ranks sends 2 (n - 1) / n
            of its size, an all-gather or a reduce-scatter half of that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.sent = dict.fromkeys(("ids", "rows", "gradients", "dense"), 0.0)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count an operator if it is a collective, and run it."""
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name not in ("barrier", "recv_"):
            self.collectives[_NAMES.get(name, name)] += 1
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _RINGS:
            rounds, tensors, group = _RINGS[name]
            count = dist.ProcessGroup.unbox(args[group]).size()
            size = sum(tensor.nbytes for tensor in tree_leaves(args[tensors]))
            self.sent["dense"] += rounds * (count - 1) / count * size
            return
        if name not in ("alltoall_base_", "send"):
            return
        sent, share = args[0][0] if name == "send" else args[1], 1.0
        if name != "send":
            splits = args[4] or [1] * dist.get_world_size()
            share = 1 - splits[dist.get_rank()] / max(1, sum(splits))
        backward = torch._C._current_autograd_node() is not None
        rows = "gradients" if backward else "rows"  # in int8 too
        kind = rows if sent.is_floating_point() or sent.dtype == torch.uint8 else "ids"
        self.sent[kind] += round(share * sent.numel()) * sent.element_size()
