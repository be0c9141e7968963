"""Ending a run early on request: SIGTERM, SIGUSR1 or Ctrl-C (SIGINT) to any of its ranks.

Schedulers send one of the first two some time before they take the machine away.  All ranks have to
stop after the same step, so they ask each other; as that takes a collective on the host, they do so
about once a second rather than after every step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from kge_torchrec.distributed.processes import Processes
from kge_torchrec.errors import KGEError

EXIT_CODE = 75  # sysexits.h: temporary failure, to be tried again
SECONDS_BETWEEN = 1.0
# torchrun sends SIGINT on to its ranks, which a terminal may have reached already.
_SECONDS_OF_ONE_CTRL_C = 1.0
_MOST_STEPS = 1000
_NOTHING, _STOP, _INTERRUPT = 0, 1, 2  # the largest of all ranks counts


class TrainingStopped(KGEError, RuntimeError):
    """A signal ended training early; a checkpoint has everything to go on from."""

    on_every_rank = True
    exit_code = EXIT_CODE


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C ended training; the message names the run's folder and the way to resume."""


class StopSignal:
    """Takes the signals while its ``with`` block runs, then gives them back.

    The first Ctrl-C asks for a stop; a signal after it raises KeyboardInterrupt at once.  SIGINT is
    left alone where a program has its own handler for it or ignores it.  Only the main thread of a
    process may handle signals: elsewhere it hears of the other ranks'.

    Args:
        note: Printed to stderr at the first Ctrl-C.
    """

    def __init__(self, processes: Processes, note: str = ""):
        self._processes, self._note = processes, note
        self._received = self._agreed = _NOTHING  # here; on any rank, when ranks asked last
        self._interrupted_at: float | None = None
        self._handlers: dict[int, Any] = {}  # as signal.signal gives them
        self._steps_left = self._steps_between = 1
        self._asked_at = time.monotonic()

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
                number = getattr(signal, name, None)
                if number is None or (number == signal.SIGINT and not _raises_interrupt()):
                    continue
                self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers.clear()

    def after_step(self) -> bool:
        """Whether to stop after this step, the same on every rank.  Collective now and then."""
        if self._processes.world_size == 1:
            return self.now()
        self._steps_left -= 1
        return self._steps_left == 0 and self.now()

    def now(self) -> bool:
        """Whether any rank was told to stop.  Collective."""
        seconds = time.monotonic() - self._asked_at
        received, seconds = self._processes.largest([self._received, seconds])
        steps = self._steps_between * SECONDS_BETWEEN / max(seconds, 1e-3)
        self._steps_left = self._steps_between = min(max(1, int(steps)), _MOST_STEPS)
        self._asked_at = time.monotonic()
        self._agreed = int(received)
        return self._agreed != _NOTHING

    @property
    def is_interrupt(self) -> bool:
        """Whether Ctrl-C on any rank was the reason, when ranks asked each other last."""
        return self._agreed == _INTERRUPT

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._interrupted_at is not None:
            is_one = now - self._interrupted_at < _SECONDS_OF_ONE_CTRL_C
            if self._processes.world_size == 1 or not is_one:
                raise KeyboardInterrupt
        elif number == signal.SIGINT:
            self._interrupted_at, self._received = now, _INTERRUPT
            os.write(2, self._note.encode())  # print may be what the signal has interrupted
        elif self._received == _NOTHING:  # a scheduler and torchrun may both send one
            self._received = _STOP


def _raises_interrupt() -> bool:
    """Whether SIGINT raises KeyboardInterrupt, as Python has it unless a program changes it."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
