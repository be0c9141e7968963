"""Early stop of a run on SIGTERM, SIGUSR1 or Ctrl-C (SIGINT) to any of its ranks.

Schedulers send SIGTERM or SIGUSR1 some time before they stop a job.  All ranks must stop after the
same step, which takes a collective on the CPU.  They therefore agree about once per second instead
of after every step.
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

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, retry later
SECONDS_BETWEEN = 1.0
# torchrun forwards SIGINT to ranks that may also get it from the terminal.
_SECONDS_OF_ONE_CTRL_C = 1.0
_MOST_STEPS = 1000
_NOTHING, _STOP, _INTERRUPT = 0, 1, 2  # the maximum over the ranks counts


class TrainingStopped(KGEError, RuntimeError):
    """A signal ended training early.  The run resumes from its checkpoint."""

    on_every_rank = True
    exit_code = EXIT_CODE


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C ended training; the message names the run's folder and how to resume."""


class StopSignal:
    """Handles the signals inside its ``with`` block, and restores the old handlers afterwards.

    The first Ctrl-C requests a stop; a later signal raises KeyboardInterrupt at once.  SIGINT is
    not handled if the program has its own handler or ignores it.  Python handles signals only in
    the main thread; in another thread, this rank only learns of signals to the other ranks.
    ``note`` is printed to stderr at the first Ctrl-C.
    """

    def __init__(self, processes: Processes, note: str = ""):
        self._processes, self._note = processes, note
        self._received = self._agreed = _NOTHING  # on this rank; on any rank, at the last agreement
        self._interrupted_at: float | None = None
        self._handlers: dict[int, Any] = {}  # the old handlers
        self._steps_left = self._steps_between = 1
        self._agreed_at = time.monotonic()

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
                number = getattr(signal, name, None)
                if number is None or (
                    number == signal.SIGINT
                    and signal.getsignal(number) is not signal.default_int_handler
                ):
                    continue
                self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers.clear()

    def after_step(self) -> bool:
        """Return whether to stop after this step, the same on every rank.

        Collective after some of the steps, the same ones on every rank.
        """
        if self._processes.world_size == 1:
            self._agreed = self._received
            return self._agreed != _NOTHING
        self._steps_left -= 1
        return self._steps_left == 0 and self.now()

    def now(self) -> bool:
        """Return whether any rank received a signal.  Collective."""
        seconds = time.monotonic() - self._agreed_at
        received, seconds = self._processes.largest([self._received, seconds])
        steps = self._steps_between * SECONDS_BETWEEN / max(seconds, 1e-3)
        self._steps_left = self._steps_between = min(max(1, int(steps)), _MOST_STEPS)
        self._agreed_at = time.monotonic()
        self._agreed = int(received)
        return self._agreed != _NOTHING

    @property
    def is_interrupt(self) -> bool:
        """Whether the reason to stop, at the last agreement, was Ctrl-C on any rank."""
        return self._agreed == _INTERRUPT

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._interrupted_at is not None:
            is_one = now - self._interrupted_at < _SECONDS_OF_ONE_CTRL_C
            if self._processes.world_size == 1 or not is_one:
                raise KeyboardInterrupt
        elif number == signal.SIGINT:
            self._interrupted_at, self._received = now, _INTERRUPT
            os.write(2, self._note.encode())  # print is not reentrant in a signal handler
        elif self._received == _NOTHING:  # a scheduler and torchrun may both send a signal
            self._received = _STOP
