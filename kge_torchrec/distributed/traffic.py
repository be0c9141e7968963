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
        bytes_sent: Bytes that all_to_all and send sent to other ranks.
        floats_sent: The elements of rows and gradients among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.bytes_sent = self.floats_sent = 0

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
            self.collectives[kinds[0]] += 1
            if kinds[0] in ("all_to_all", "send"):
                names = [argument.name for argument in func._schema.arguments]
                self._count(dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, arguments: dict[str, Any]) -> None:
        """Count what an all_to_all or a send sends, without this rank's own part."""
        # It has inputs, or sends the tensors of its arguments.
        names = [name for name in arguments if name.startswith("input")] or list(arguments)
        leaves = tree_leaves([arguments[name] for name in names])
        (tensor,) = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        elements = tensor.numel()
        if names != list(arguments):
            splits = arguments.get("input_split_sizes") or [1] * dist.get_world_size()
            elements -= elements * splits[dist.get_rank()] // max(1, sum(splits))
        self.bytes_sent += elements * tensor.element_size()
        self.floats_sent += elements * tensor.is_floating_point()
