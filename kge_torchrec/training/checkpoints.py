"""Distributed checkpoints of a run: written whole or not at all, the last k kept, and the best.

A checkpoint is a folder that torch.distributed.checkpoint wrote, plus ``progress.json`` and
``manifest.json``, which lists the size of every file.  It is written under a hidden name and
renamed when complete, so that a crash or a full disk leaves the earlier ones alone.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from kge_torchrec.entities.pieces import in_pieces
from kge_torchrec.errors import KGEError
from kge_torchrec.parallel.processes import Processes, on_first_rank
from kge_torchrec.training.progress import Progress

FORMAT_VERSION = 1
_MANIFEST, _PROGRESS = "manifest.json", "progress.json"
_FAILURES = (Exception, CheckpointException)  # torch's is a BaseException
log = logging.getLogger(__name__)


class CheckpointError(KGEError, RuntimeError):
    """A checkpoint could not be written or read; the message says which and why."""

    on_every_rank = True


def name_of(progress: Progress) -> str:
    """The name of the checkpoint at this progress."""
    return f"step-{progress.global_step:012d}"


class Checkpoints:
    """The ``checkpoints`` folder of a run."""

    def __init__(self, folder: Path, processes: Processes, keep: int = 2):
        self.folder, self.processes, self.keep = folder, processes, keep

    def names(self) -> list[str]:
        """Complete checkpoints, oldest first."""
        found = (p.parent for p in self.folder.glob(f"step-*/{_MANIFEST}"))
        return sorted(p.name for p in found)

    def save(self, engine_state: dict[str, Any], progress: Progress) -> str:
        """Writes a checkpoint and drops the ones no longer kept; returns its name.  Collective.

        Raises CheckpointError, on every rank, when it cannot be written; the earlier ones stay.
        """
        name = name_of(progress)
        target, partial = self.folder / name, self.folder / f".partial-{name}"
        state = {
            "engine": in_pieces(engine_state),
            "random": {self._random_key: torch.get_rng_state()},
        }
        try:
            on_first_rank(self.processes, lambda: _make_empty(partial))
            dcp.save(state, checkpoint_id=str(partial))
            on_first_rank(self.processes, lambda: _finish(partial, target, progress))
        except _FAILURES as error:
            if self.processes.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            kept = ", ".join(self.names()) or "none"
            raise CheckpointError(
                f"checkpoint {name} could not be written to {self.folder}: {_cause(error)} "
                f"({_free(self.folder)} free on that disk); earlier checkpoints are intact: "
                f"{kept}. Make room, then train --resume."
            ) from error
        on_first_rank(self.processes, lambda: self._prune(name, progress.best_checkpoint))
        return name

    def newest(self) -> str | None:
        """The newest checkpoint that is whole, with a warning for each newer one that is not.

        Collective.  None when there is no checkpoint at all; CheckpointError when all are damaged.
        """
        problems = []
        for name in self.names()[::-1]:
            problem = self._damage(name)
            if problem is None:
                return name
            problems.append(f"{name}: {problem}")
            if self.processes.is_first:
                log.warning("checkpoint %s: %s; trying an earlier one", name, problem)
        if problems:
            raise CheckpointError(f"no readable checkpoint in {self.folder}: {'; '.join(problems)}")
        return None

    def progress(self, name: str) -> Progress:
        """The progress stored with a checkpoint.  Raises CheckpointError if it is damaged."""
        problem = self._damage(name)
        if problem is not None:
            raise CheckpointError(f"checkpoint {name} in {self.folder}: {problem}")
        values = (self.folder / name / _PROGRESS).read_text(encoding="utf-8")
        return Progress.from_dict(json.loads(values))

    def load(self, engine_state: dict[str, Any], name: str) -> None:
        """Fills ``engine_state`` in place.  Collective; raises CheckpointError if it cannot."""
        path = self.folder / name
        state = {"engine": in_pieces(engine_state)}
        try:
            stored = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
            has_random = f"random.{self._random_key}" in stored
            if has_random:  # absent when the run had fewer ranks
                state["random"] = {self._random_key: torch.get_rng_state()}
            dcp.load(state, checkpoint_id=str(path))
        except _FAILURES as error:
            raise CheckpointError(
                f"checkpoint {name} in {self.folder} could not be read: {_cause(error)}"
            ) from error
        if has_random:
            torch.set_rng_state(state["random"][self._random_key])

    def _damage(self, name: str) -> str | None:
        return on_first_rank(self.processes, lambda: _damage(self.folder / name))

    @property
    def _random_key(self) -> str:
        return f"rank{self.processes.rank}"

    def _prune(self, newest: str, best: str | None) -> None:
        """Newer ones than the one just written were damaged, or this run would have read them."""
        names = self.names()
        until_now = [name for name in names if name <= newest]
        for name in names:
            if name not in until_now[-self.keep :] and name != best:
                shutil.rmtree(self.folder / name)


def _make_empty(folder: Path) -> None:
    for leftover in folder.parent.glob(".partial-*"):  # of a run that was killed while writing
        shutil.rmtree(leftover)
    folder.mkdir(parents=True)


def _finish(partial: Path, target: Path, progress: Progress) -> None:
    """Completes a checkpoint on disk, then gives it its name."""
    (partial / _PROGRESS).write_text(json.dumps(progress.to_dict(), indent=1), encoding="utf-8")
    sizes = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
    manifest = {"format": FORMAT_VERSION, "torch": torch.__version__, "files": sizes}
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for file in partial.iterdir():
        _sync(file)
    if target.exists():  # the same step again, after a resume
        shutil.rmtree(target)
    partial.rename(target)
    _sync(target.parent)


def _free(folder: Path) -> str:
    """Free space around a folder, which may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{_MANIFEST} cannot be read ({_first_line(error)})"
    if manifest.get("format") != FORMAT_VERSION:
        return f"format {manifest.get('format')}, this version reads {FORMAT_VERSION}"
    for name, size in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
    return None


def _cause(error: BaseException) -> str:
    """What went wrong, where torch reports a failure of each rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = min(error.failures.items())
        return f"rank {rank}: {_first_line(failure)}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
