"""What a piece of torch costs: every operation inside is watched as it runs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


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

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
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


def _work(operation, args, kwargs, out) -> int:
    """Floating-point operations of what is limited by arithmetic; 0 for what moves bytes."""
    packet = operation.overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    if packet is torch.ops.aten._cdist_forward:  # subtract, square or absolute value, add
        return 3 * prod(out.shape) * args[0].shape[-1]
    if packet is torch.ops.aten._cdist_backward:  # once for each side
        return 6 * prod(args[0].shape) * args[1].shape[-1]
    return 0
