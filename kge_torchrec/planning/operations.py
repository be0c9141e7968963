"""What a piece of torch costs: operations, and bytes that collectives send, watched as they run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kge_torchrec.distributed.shared_memory import CollectiveWatch
from kge_torchrec.models.fused_distances import GRADIENT_OF_PAIRS, VALUE_OF_PAIRS


@dataclass(frozen=True)
class Cost:
    """Of what was watched."""

    peak_bytes: float  # most bytes of activations and gradients alive at once
    largest_bytes: float  # of one tensor among them
    flops: float  # of matrix products and distances
    moved_bytes: float  # read and written by all other operations
    operations: float

    def extended(self, larger: Cost, factor: float) -> Cost:
        """On the line through this and a larger cost, ``factor`` times as far as that one."""
        pairs = zip(vars(self).values(), vars(larger).values(), strict=True)
        return Cost(*(one + factor * (two - one) for one, two in pairs))


class WatchOperations(TorchDispatchMode):
    """Counts the bytes alive, the work and the bytes moved of all operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = self.flops = self.moved = self.operations = 0
        self._seen: set[int] = set()

    @property
    def cost(self) -> Cost:
        return Cost(self.peak, self.largest, self.flops, self.moved, self.operations)

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {_key(tensor) for tensor in tensors}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in made:
            if _key(tensor) not in known:
                self._born(tensor)
        if operation.is_view:
            return out
        self.operations += 1
        work = _work(operation, args, kwargs, out)
        if work:
            self.flops += work
        else:
            self.moved += sum(t.numel() * t.element_size() for t in tensors + made)
        return out

    def _born(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        self.largest = max(self.largest, storage.nbytes())
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _work(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of what is limited by arithmetic; 0 for what moves bytes."""
    packet, aten = operation.overloadpacket, torch.ops.aten
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    if packet in (aten._cdist_forward, VALUE_OF_PAIRS):  # subtract, square or absolute value, add
        return 3 * prod(out.shape) * args[0].shape[-1]
    if packet in (aten._cdist_backward, GRADIENT_OF_PAIRS):  # once for each side
        return 6 * prod(args[0].shape) * args[1].shape[-1]
    return 0


class WatchCollectives(CollectiveWatch):
    """Counts inside its block, on the thread that trains; DDP's own collectives pass by as well.

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
            if sent.dtype == torch.int64:
                self.sent["ids"] += self._others(sent, splits)
            else:
                backward = torch._C._current_autograd_node() is not None
                self.sent["gradients" if backward else "rows"] += self._others(sent, splits)
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
        elif operation is not torch.ops.c10d.barrier:
            raise NotImplementedError(f"{operation} is not counted")

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
