"""Lines about the progress of a run on stderr: notes, epochs, validations, the race of defaults.

They are records of the logger ``kge_torchrec.progress``, whose level and handlers a program may
change. ``run.progress`` hides bars only.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class LineHandler(logging.Handler):
    """Writes records above progress bars, with the time in front."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        is_warning = record.levelno >= logging.WARNING
        start = f"{record.levelname}:" if is_warning else at
        try:
            tqdm.write(f"{start} {record.getMessage()}", file=sys.stderr)
        except OSError:  # nobody reads stderr any more
            self.handleError(record)


LOGGER = logging.getLogger("kge_torchrec.progress")
LOGGER.setLevel(LOGGER.level or logging.INFO)  # a program may have chosen one before
LOGGER.propagate = False
LOGGER.addHandler(LineHandler())


def say(text: str) -> None:
    """Write a line, if this is rank 0."""
    if os.environ.get("RANK", "0") == "0":
        LOGGER.info(text)


@contextmanager
def silence(silent: bool = True) -> Iterator[None]:
    """Write no lines inside the block: those of a trial say what the search says better."""
    level = LOGGER.level
    if silent:
        LOGGER.setLevel(logging.WARNING)
    try:
        yield
    finally:
        LOGGER.setLevel(level)
