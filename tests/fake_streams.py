"""Streams of CUDA without a GPU, which remember what starts on them and what they wait for."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace


class FakeCuda:
    """Stands for ``torch.cuda``; ``events`` are in the order of the host.

    Args:
        error: What the end of a capture raises.
    """

    def __init__(self, error: str = ""):
        self.events: list[str] = []
        self._now, self._error, self._recorded = threading.local(), error, 0
        self.default_generators = [self]

    @property
    def now(self) -> str:
        """The current stream of this thread."""
        return getattr(self._now, "name", "main")

    def Stream(self, device=None):
        return FakeStream("aside", self)

    def current_stream(self, device=None):
        return FakeStream(self.now, self)

    def current_device(self):
        return 0

    def clone_state(self):
        return "a clone of the generator"

    def graphsafe_set_state(self, state):
        self.events.append(state)

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.events.append("replay"))

    @contextmanager
    def stream(self, stream):
        before, self._now.name = self.now, stream.name
        yield
        self._now.name = before

    @contextmanager
    def graph(self, graph, capture_error_mode):
        self.events.append(f"capture, errors {capture_error_mode}")
        yield
        if self._error:
            raise RuntimeError(self._error)


class FakeStream:
    """A stream; an event is a number."""

    def __init__(self, name: str, cuda: FakeCuda):
        self.name, self._cuda = name, cuda

    def wait_stream(self, other) -> None:
        self._cuda.events.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> int:
        self._cuda._recorded += 1
        self._cuda.events.append(f"{self.name} records {self._cuda._recorded}")
        return self._cuda._recorded

    def wait_event(self, event: int) -> None:
        self._cuda.events.append(f"{self.name} waits for {event}")
