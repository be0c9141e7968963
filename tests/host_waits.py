"""Counts what would make the host wait for a GPU, or copy to it, on a machine that has none."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Reading numbers of a tensor, or a result whose size depends on them.
_WAITS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
    "equal", "allclose",
}  # fmt: skip
_COPIES = {"tensor", "as_tensor", "new_tensor", "from_numpy"}
# The same below Python, where a library's own operators call them.
_OPERATIONS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
    "equal",
}  # fmt: skip


class _Functions(TorchFunctionMode):
    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in _WAITS or name in _COPIES:
            self.counts[f"{name} in {_caller()}"] += 1
        if name == "__getitem__" and getattr(args[1], "dtype", None) == torch.bool:
            self.counts[f"boolean index in {_caller()}"] += 1
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in _OPERATIONS:
            self.counts[f"{name} in {_caller()}"] += 1
        return function(*args, **(kwargs or {}))


def _caller() -> str:
    """Return the name of the calling function outside torch."""
    inside = (f"{Path(torch.__file__).parent}/", str(Path(__file__)))
    for frame in reversed(traceback.extract_stack()):
        if not (frame.filename.startswith(inside) or frame.name.startswith("<")):
            return f"{Path(frame.filename).stem}.{frame.name}"
    return "torch"


@contextmanager
def host_waits() -> Iterator[Counter[str]]:
    """Count the waits of this thread inside the block, as {"item in file.function": times}.

    A wait counts once for the Python call and once for the operation below it.
    """
    counts: Counter[str] = Counter()
    with _Functions(counts), _Operations(counts):
        yield counts
