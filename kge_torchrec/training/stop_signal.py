"""Ending a run early on request: SIGTERM or SIGUSR1 to any of its ranks.

Schedulers send one of them some time before they take the machine away.  All ranks have to stop
after the same step, so they ask each other; as that takes a collective on the host, they do so
about once a second rather than after every step.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from kge_torchrec.distributed.processes import Processes
from kge_torchrec.errors import KGEError

EXIT_CODE = 75  # sysexits.h: temporary failure, to be tried again
SECONDS_BETWEEN = 1.0
_MOST_STEPS = 1000


class TrainingStopped(KGEError, RuntimeError):
    """A signal ended training early; a checkpoint has everything to go on from."""

    on_every_rank = True
    exit_code = EXIT_CODE


class StopSignal:
    """Takes the signals while its ``with`` block runs, then gives them back.

    Only the main thread of a process may handle signals: elsewhere it hears of the other ranks'.
    """

    def __init__(self, processes: Processes):
        self._processes = processes
        self._received = False
        self._handlers: dict[int, Any] = {}  # as signal.signal gives them
        self._steps_left = self._steps_between = 1
        self._asked_at = time.monotonic()

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGUSR1"):
                number = getattr(signal, name, None)
                if number is not None:
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers.clear()

    def after_step(self) -> bool:
        """Whether to stop after this step, the same on every rank.  Collective now and then."""
        if self._processes.world_size == 1:
            return self._received
        self._steps_left -= 1
        return self._steps_left == 0 and self.now()

    def now(self) -> bool:
        """Whether any rank was told to stop.  Collective."""
        seconds = time.monotonic() - self._asked_at
        received, seconds = self._processes.largest([self._received, seconds])
        steps = self._steps_between * SECONDS_BETWEEN / max(seconds, 1e-3)
        self._steps_left = self._steps_between = min(max(1, int(steps)), _MOST_STEPS)
        self._asked_at = time.monotonic()
        return bool(received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Once or often is the same: a scheduler and torchrun may both tell a rank.
        self._received = True
