"""What a batch needs to move between host and device, as TorchRec's pipeline asks for it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torchrec.streamable import Pipelineable


class Movable(Pipelineable):
    """A dataclass whose tensors (and jagged tensors) move together; other fields stay."""

    def _map(self, change) -> Movable:
        return replace(self, **{name: change(getattr(self, name)) for name in self._tensors()})

    def _tensors(self) -> list[str]:
        names = (field.name for field in fields(self))
        return [name for name in names if hasattr(getattr(self, name), "record_stream")]

    def to(self, device: torch.device, non_blocking: bool = False) -> Movable:
        return self._map(lambda x: x.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Movable:
        return self._map(lambda x: x.pin_memory())

    def record_stream(self, stream: Any) -> None:
        for name in self._tensors():
            getattr(self, name).record_stream(stream)
