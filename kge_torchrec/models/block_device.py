"""Whose block sizes a computation takes: of its tensors' device, or of the one planned for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_planned_for = ContextVar("planned_for", default="cuda")


def block_device(x: Tensor) -> str:
    """ "cpu" or "cuda"; tensors on the meta device stand for what they plan for."""
    kind = x.device.type
    return _planned_for.get() if kind == "meta" else "cpu" if kind == "cpu" else "cuda"


@contextmanager
def planning_for(kind: str) -> Iterator[None]:
    """Inside, tensors on the meta device stand for those of "cpu" or "cuda"."""
    token = _planned_for.set(kind)
    try:
        yield
    finally:
        _planned_for.reset(token)
