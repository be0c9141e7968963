"""Registration of kernels as operators of torch, and the kinds of comparison that they distinguish.

Not by ``torch.library.custom_op``: forward and backward of an operator without work take 72 us with
it and 53 us by ``Library.define`` and ``Library.impl`` (one thread), and the first call imports
torch's compiler, 1.2 s of CPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

_LIBRARY = torch.library.Library("kge_torchrec", "FRAGMENT")


def operator(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    mutates: tuple[str, ...] = (),
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> OpOverload:
    """Register a function as an operator of the namespace kge_torchrec, and return that.

    Args:
        name: The operator's name.
        function: The implementation on a CPU and on CUDA; its annotations are the schema.
        fake: The shapes of the outputs, for tensors without data.
        mutates: The arguments that the function writes into.
        save: Saves for backward, as ``setup_context`` of ``torch.library.register_autograd``.
        backward: The gradients by the inputs; None for an operator without gradient.
    """
    full_name = f"kge_torchrec::{name}"
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    for device in ("CPU", "CUDA"):  # in Triton's interpreter its kernels run on a CPU
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(full_name, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(full_name, backward, setup_context=save, lib=_LIBRARY)
    return getattr(torch.ops.kge_torchrec, name).default


@cache
def has_triton() -> bool:
    """Return whether Triton can compile: it needs a C compiler for its launchers."""
    chosen = os.environ.get("CC")
    has_compiler = any(map(shutil.which, [chosen] if chosen else ["gcc", "clang"]))
    return has_compiler and importlib.util.find_spec("triton") is not None


def arrays(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    """Return tensors on a CPU as numpy arrays that share their memory."""
    return tuple(tensor.detach().numpy() for tensor in tensors)


Distance = Literal["euclidean", "manhattan", "moduli"]
Compared = Literal["dot", Distance]  # a query with a row
Mapped = Literal["scaled_manhattan", "scaled_squares"]  # see pair_scores
EPSILON = 1e-12  # added to the squared modulus before the root
