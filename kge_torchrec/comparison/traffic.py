"""What a rank sends, seen where every engine must pass: the collectives that torch dispatches.

Works as torch.distributed.tensor.debug.CommDebugMode does, which counts collectives but not their
bytes.  Collectives of backward are seen as well, those of DistributedDataParallel included.

Shapes: W ranks, D numbers an entity.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("c10d", "_c10d_functional")
# Beginning of an operator's name -> kind; of two that fit, the first one counts.
_KINDS = {
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "isend": "send",
}


class Traffic(TorchDispatchMode):
    """While entered, counts this rank's collectives.

    collectives: by kind, how many.
    payload_bytes: by kind, the size of what was handed to them, this rank's own part included.
    rows_sent, integers_sent: what all_to_all carried to other ranks: rows of floats (of the table
        on their way to who asked, of gradients on their way back), and ids with the counts that
        announce them.
    bytes_sent: of both.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.collectives: dict[str, int] = defaultdict(int)
        self.payload_bytes: dict[str, int] = defaultdict(int)
        self.bytes_sent = self.integers_sent = self._floats_sent = 0

    @property
    def rows_sent(self) -> float:
        return self._floats_sent / self.dim

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind is not None:
            names = [argument.name for argument in func._schema.arguments]
            self._count(kind, dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, kind: str, arguments: dict[str, Any]) -> None:
        inputs = _inputs(arguments)
        self.collectives[kind] += 1
        self.payload_bytes[kind] += sum(tensor.nbytes for tensor in inputs)
        if kind == "all_to_all":
            for tensor, elements in zip(inputs, _leaving(inputs, arguments), strict=True):
                self.bytes_sent += elements * tensor.element_size()
                if tensor.is_floating_point():
                    self._floats_sent += elements
                else:
                    self.integers_sent += elements

    def per_step(self, steps: int) -> dict[str, Any]:
        """The counts as means over ``steps`` steps."""
        return {
            "rows_sent": self.rows_sent / steps,
            "integers_sent": self.integers_sent / steps,
            "bytes_sent": self.bytes_sent / steps,
            "collectives": {kind: n / steps for kind, n in self.collectives.items()},
            "payload_bytes": {kind: n / steps for kind, n in self.payload_bytes.items()},
        }


def _kind(func) -> str | None:
    """The kind of collective that an operator starts; None for waits, barriers and all others."""
    if func.namespace not in _NAMESPACES:
        return None
    name = func.overloadpacket.__name__.lstrip("_")
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)


def _inputs(arguments: dict[str, Any]) -> list[Tensor]:
    """What a collective is handed: its input, or the tensors it works on in place."""
    names = [name for name in arguments if name.startswith("input")] or list(arguments)
    leaves = tree_leaves([arguments[name] for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _leaving(inputs: list[Tensor], arguments: dict[str, Any]) -> list[int]:
    """Elements of each input of an all_to_all that go to other ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(inputs) == world and "input_tensors" in arguments:  # one tensor a rank
        return [0 if to == rank else tensor.numel() for to, tensor in enumerate(inputs)]
    (tensor,) = inputs
    splits = arguments.get("input_split_sizes")
    if not splits:  # equal parts
        return [tensor.numel() - tensor.numel() // world]
    others = sum(splits) - splits[rank]
    return [others * (tensor.numel() // max(1, tensor.shape[0]))]
