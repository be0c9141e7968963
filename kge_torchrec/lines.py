"""Lines about the progress of a run on stderr: notes, epochs, validations, the race of defaults.

They are records of the logger ``kge_torchrec.progress``, whose level and handlers a program may
change. ``run.progress`` hides bars only.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kge_torchrec.files import finite


class LineHandler(logging.Handler):
    """Writes records above progress bars: text with the time in front, or JSON objects."""

    as_json = False

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        is_warning = record.levelno >= logging.WARNING
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        text = record.getMessage()
        if self.as_json:
            kind = record.levelname.lower() if is_warning else getattr(record, "kind", "note")
            values = finite(getattr(record, "values", {}))
            line = json.dumps({"time": at, "kind": kind, "text": text, **values})
        else:
            line = f"{record.levelname if is_warning else at}{':' * is_warning} {text}"
        try:
            tqdm.write(line, file=sys.stderr)
        except OSError:  # nobody reads stderr any more
            self.handleError(record)


LOGGER = logging.getLogger("kge_torchrec.progress")
LOGGER.setLevel(LOGGER.level or logging.INFO)  # a program may have chosen one before
LOGGER.propagate = False
HANDLER = LineHandler()
LOGGER.addHandler(HANDLER)


def say(text: str, kind: str = "note", **values: Any) -> None:
    """Write a line, if this is rank 0; kind and values are for programs, as in metrics.jsonl."""
    if os.environ.get("RANK", "0") == "0":
        LOGGER.info(text, extra={"kind": kind, "values": values})


def say_error(text: str) -> None:
    """Write why a program ends, from any rank."""
    if HANDLER.as_json:
        LOGGER.error(text)
    else:
        print(text, file=sys.stderr)


def show_as_json() -> None:
    """Write one JSON object per line from now on, for warnings as well."""
    HANDLER.as_json = True
    logging.basicConfig(handlers=[HANDLER], level=logging.WARNING, force=True)


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
