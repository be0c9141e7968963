"""Traffic: the collectives of a rank, and what it sends to other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The first kind counts that begins an operator's name, both without underscores.
_KINDS = (
    "all_to_all", "all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "gather",
    "scatter", "send",
)  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts this rank's collectives and messages while entered, those of backward and of DDP too.

    It sees the collectives that torch dispatches, as torch.distributed.tensor.debug.CommDebugMode
    does, which counts collectives but not their bytes.

    Attributes:
        collectives: Number per kind; a message to another rank is a "send".
        payload_bytes: Per kind, the size of their inputs, this rank's own part included.
        integers_sent: Ids and their counts that went to other ranks by all_to_all or send.
        floats_sent: The elements of rows and gradients that did.
        bytes_sent: Everything that did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: dict[str, int] = defaultdict(int)
        self.payload_bytes: dict[str, int] = defaultdict(int)
        self.bytes_sent = self.integers_sent = self.floats_sent = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count an operator if it is a collective, and run it."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.replace("_", "").removeprefix("i")
        kinds = [kind for kind in _KINDS if name.startswith(kind.replace("_", ""))]
        if kinds and func.namespace in ("c10d", "_c10d_functional"):
            names = [argument.name for argument in func._schema.arguments]
            self._count(kinds[0], dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, kind: str, arguments: dict[str, Any]) -> None:
        # A collective has inputs, or works in place on the tensors of its arguments.
        names = [name for name in arguments if name.startswith("input")] or list(arguments)
        leaves = tree_leaves([arguments[name] for name in names])
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.collectives[kind] += 1
        self.payload_bytes[kind] += sum(tensor.nbytes for tensor in inputs)
        if kind not in ("all_to_all", "send"):
            return
        (tensor,) = inputs
        elements = tensor.numel()
        if kind == "all_to_all":  # without this rank's own part
            splits = arguments.get("input_split_sizes")
            size, own = (
                (sum(splits), splits[dist.get_rank()]) if splits else (dist.get_world_size(), 1)
            )
            elements -= elements * own // max(1, size)
        self.bytes_sent += elements * tensor.element_size()
        if tensor.is_floating_point():
            self.floats_sent += elements
        else:
            self.integers_sent += elements
