"""Kinds of comparison that operators distinguish, and the device that their choices are made for.

Scorers name a comparison; each operator reads the name and takes its own formula for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from torch import Tensor, float64

Distance = Literal["euclidean", "manhattan", "moduli"]
Compared = Literal["dot", Distance]  # a query with a row
Mapped = Literal["scaled_manhattan", "scaled_squares", "hyperplane_squares"]  # see pair_scores
# How a relation acts on its anchor: as real numbers, as complex ones, or by its conjugate.
Action = Literal["real", "complex", "conjugate"]
EPSILON = 1e-12  # added to the squared modulus before the root
_planned_for = ContextVar("planned_for", default="cuda")


def block_device(x: Tensor) -> str:
    """Return the device whose implementation serves a tensor, "cpu" or "cuda".

    Tensors on the meta device stand for the device that ``planning_for`` names.
    """
    kind = x.device.type
    return _planned_for.get() if kind == "meta" else "cpu" if kind == "cpu" else "cuda"


def has_pair_kernels(x: Tensor) -> bool:
    """Whether the numba kernels over pairs support a tensor: on a CPU, except in float64."""
    return x.device.type == "cpu" and x.dtype != float64


@contextmanager
def planning_for(kind: str) -> Iterator[None]:
    """Let tensors on the meta device stand for those of "cpu" or "cuda" inside the context."""
    token = _planned_for.set(kind)
    try:
        yield
    finally:
        _planned_for.reset(token)
