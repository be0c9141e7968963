"""What carries the ids of a lookup: TorchRec's jagged tensors, or plain ones where it is missing.

TorchRec has no wheels for macOS and Windows.  The hand-rolled engine needs of its tensors the
values alone, so that it trains there as well.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    from torchrec import JaggedTensor, KeyedJaggedTensor
    from torchrec.streamable import Pipelineable
except ImportError:

    class Pipelineable:  # type: ignore[no-redef]
        """What moves between devices as a whole."""

    class JaggedTensor:  # type: ignore[no-redef]
        """Values (M, ...) of one feature."""

        def __init__(self, values: Tensor, lengths: Tensor | None = None, **_: Any):
            self._values = values

        def values(self) -> Tensor:
            return self._values

    class KeyedJaggedTensor(JaggedTensor):  # type: ignore[no-redef]
        """Values (M,) under one key."""

        def __init__(self, keys: list[str], values: Tensor, lengths: Tensor, **_: Any):
            super().__init__(values)

        def to(self, device: Any, non_blocking: bool = False) -> KeyedJaggedTensor:
            return self._with(self._values.to(device=device, non_blocking=non_blocking))

        def pin_memory(self) -> KeyedJaggedTensor:
            return self._with(self._values.pin_memory())

        def record_stream(self, stream: Any) -> None:
            self._values.record_stream(stream)

        def _with(self, values: Tensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor([], values, values)


__all__ = ["JaggedTensor", "KeyedJaggedTensor", "Pipelineable"]
