"""Runs that fail or are interrupted: what they leave behind, and how they are resumed.

A new run that fails before its first checkpoint leaves nothing, so that the same command starts it
again.  Any later failure leaves the run, which resumes from its newest checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kge_torchrec.distributed.processes import Processes
from kge_torchrec.training.run_folder import STARTED, TRAINED, RunFolder
from kge_torchrec.training.stop_signal import TrainingInterrupted

log = logging.getLogger(__name__)


@contextmanager
def interrupts_named(folder: RunFolder) -> Iterator[None]:
    """Turn a KeyboardInterrupt into TrainingInterrupted, which says how to resume the run."""
    try:
        yield
    except TrainingInterrupted:
        raise
    except KeyboardInterrupt as error:
        if not folder.holds_run:
            raise
        raise TrainingInterrupted(
            f"interrupted; resume with `train --resume {folder.path}`."
        ) from error


@contextmanager
def undone_on_failure(
    folder: RunFolder, before: frozenset[str], ranks: Processes
) -> Iterator[None]:
    """Remove the files of a new run that fails before its first checkpoint.

    Args:
        folder: Folder of the run.
        before: Names in the folder before the run; they stay.
        ranks: The ranks.
    """
    try:
        yield
    except Exception:
        if ranks.is_first and not (folder.has_checkpoint or folder.has_race):
            _make_way(folder, before)
        raise


def _make_way(folder: RunFolder, before: frozenset[str]) -> None:
    """Remove the files of a failed run but those from before, so that it can start again."""
    had_begun = folder.metrics.is_file()
    try:
        folder.remove(name for name in (*TRAINED, *STARTED) if name not in before)
    except OSError as error:
        log.warning("files of the failed run in %s could not be removed: %s", folder.path, error)
        return
    if had_begun:
        log.warning(
            "the run ended before its first checkpoint and has left %s; repeat the command to "
            "start it again",
            folder.path,
        )


def undo(folder: RunFolder) -> None:
    """Remove the files of a run that failed to start, and its folder if nothing else is there."""
    folder.remove(STARTED)
    if folder.path.is_dir() and not folder.entries:
        folder.path.rmdir()
