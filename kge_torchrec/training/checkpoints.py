"""Distributed checkpoints of a run: written atomically; the last k and the best are kept.

A checkpoint is a folder (``checkpoint_index``) with the tensors (``checkpoint_storage``).  It is
written under a hidden name and renamed when complete, so a crash or a full disk does not affect
earlier checkpoints.  Training may continue while it is written (``checkpoint_saving``).

Rank 0 lists the folder for all ranks, because hosts may see different listings of a network disk.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kge_torchrec import files
from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import Processes, is_lost_connection, on_first_rank
from kge_torchrec.errors import KGEError, StoreError, first_line
from kge_torchrec.training.checkpoint_index import (
    MANIFEST,
    Damaged,
    Index,
    NonFiniteParameters,
    finish,
    make_empty,
    open_checkpoint,
    read_whole,
)
from kge_torchrec.training.state import TrainState

if TYPE_CHECKING:
    from kge_torchrec.training.checkpoint_saving import Saving

RAW = "raw"  # part of the state: weights that training continues from, if the model is an average
BEST, NEWEST = "best", "newest"  # accepted in place of a checkpoint's name
_RECORD = "checkpoints.json"  # in the run's folder; tells which checkpoints should exist
Take = Callable[[Path, Index, TrainState], object]
_PATIENCE = 5.0  # seconds that a checkpoint gets to end when another rank is gone
log = logging.getLogger(__name__)


class CheckpointError(KGEError, RuntimeError):
    """A checkpoint could not be written or read; the message says which one and why."""

    on_every_rank = True


def no_checkpoint(run: Path) -> CheckpointError:
    """Return the error for a run without a checkpoint."""
    return CheckpointError(f"{run} has no checkpoint yet: train it first")


def name_of(progress: TrainState) -> str:
    """Return the name of the checkpoint at this progress."""
    return f"step-{progress.global_step:012d}"


class Checkpoints:
    """The ``checkpoints`` folder of a run.  Every method is collective.

    Args:
        folder: The folder.
        processes: The ranks of the run.
        keep: Number of checkpoints to keep besides the best one, at least 1.
        data: Fingerprint of the current store, which loading compares with that of the checkpoint.
    """

    def __init__(self, folder: Path, processes: Processes, keep: int = 2, data: str = ""):
        self.folder, self.processes, self.keep, self.data = folder, processes, keep, data
        # Of rank 0: called when a checkpoint is complete, and names that pruning leaves.
        self.completed: Callable[[], object] = lambda: None
        self.held: Callable[[], Collection[str]] = tuple
        self.say: Callable[[str], object] = log.info  # gets the choice of how to write
        self._said: set[str] = set()
        self._saving: tuple[str, float, Saving] | None = None  # name, pause in seconds, writing

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, oldest first."""
        return on_first_rank(self.processes, self._names)

    def save(
        self,
        engine_state: dict[str, Any],
        progress: TrainState,
        link: Callable[[Path], Index | None] = lambda folder: None,
        background: str = "none",
    ) -> str:
        """Write a checkpoint, remove old ones and return the name of the new one.

        Args:
            engine_state: The tensors.
            progress: The progress.
            link: Adds files with more tensors to the folder; returns their index on rank 0.
            background: Whether it may still be written after this call, which ``settle`` then
                waits for: a value of checkpoint.options.background.

        Raises:
            CheckpointError: The checkpoint cannot be written.  Earlier checkpoints are intact.
            NonFiniteParameters: A tensor has NaN or infinity.
        """
        from kge_torchrec.training import checkpoint_saving as saving
        from kge_torchrec.training import checkpoint_storage as storage

        self.settle()
        begun, name, ranks = time.perf_counter(), name_of(progress), self.processes
        partial = self._partial(name)
        state = {"engine": engine_state}
        progress = TrainState(**progress.to_dict())  # training continues to change it
        with self._failing_together(name):
            plan = storage.plan_saving(state, single_rank=ranks.world_size == 1)
            own = {piece.values.data_ptr() for piece in plan.pieces}
            saving.check_finite(engine_state, ranks, own)  # what other ranks write
            on_first_rank(ranks, lambda: make_empty(partial))
            index = {**(plan.index or {}), **(link(partial) or {})}

            def complete(checksums: dict[str, list[int]]) -> None:
                written = storage.with_checksums(index, checksums)
                finish(partial, self.folder / name, written, progress)
                record = {"newest": name, "best": progress.best_checkpoint}
                files.write_json(self.folder.parent / _RECORD, record)
                self._prune(name, progress.best_checkpoint)
                self.completed()

            started = saving.Saving(plan, partial, ranks, complete)
            way, why = saving.way_of(background, plan, ranks)
            if why and why not in self._said and ranks.is_first:
                self._said.add(why)
                self.say(why)
            started.start(way)
        self._saving = name, time.perf_counter() - begun, started
        if way == saving.NONE:
            self.settle()
        return name

    def settle(self, waits: bool = True) -> dict[str, Any] | None:
        """End the writing of the last checkpoint.

        Args:
            waits: Whether to wait for it.

        Returns:
            Its figures: name, way, pause_ms, seconds, extra_memory_bytes.  None if there is nothing
            to end yet.

        Raises:
            CheckpointError: The checkpoint cannot be written.  Earlier checkpoints are intact.
            NonFiniteParameters: A tensor has NaN or infinity.
        """
        if self._saving is None:
            return None
        name, pause, saving = self._saving
        with self._failing_together(name):
            figures = saving.settle(waits)
        if figures is None:
            return None
        self._saving = None
        return {"name": name, "way": saving.way, "pause_ms": round(1000 * pause, 1), **figures}

    @contextmanager
    def _failing_together(self, name: str) -> Iterator[None]:
        """Turn an error of all ranks into a CheckpointError, and remove what was written."""
        try:
            yield
        except Exception as error:
            _raise_if_rank_lost(error)
            self._saving = None
            problem = self._not_written(name, self._partial(name), error)
            if isinstance(error, NonFiniteParameters):
                raise
            raise CheckpointError(problem) from error

    @contextmanager
    def closing(self) -> Iterator[None]:
        """End the writing of the last checkpoint with an error of the block.  Not collective.

        The checkpoint is completed where the other ranks can still write theirs.
        """
        try:
            yield
        except BaseException as error:
            saving, self._saving = self._saving, None
            if saving is not None:
                at_once = not isinstance(error, Exception)
                patience = _PATIENCE if is_lost_connection(error) else self.processes.timeout
                saving[-1].stop(0 if at_once else patience)
            raise

    def _partial(self, name: str) -> Path:
        return self.folder / f".partial-{name}"

    def load(self, engine_state: dict[str, Any], name: str, take: Take | None = None) -> TrainState:
        """Fill ``engine_state`` in place; return the progress stored with the checkpoint.

        Args:
            engine_state: The tensors to fill.
            name: The checkpoint.
            take: Reads more tensors, given the checkpoint's folder and index; collective.

        Raises:
            CheckpointError: The checkpoint cannot be read.  Some tensors may have been filled.
            StoreError: The checkpoint was trained on other triples.
        """
        folder = self.folder / name
        try:
            index, progress = on_first_rank(self.processes, lambda: open_checkpoint(folder))
            self._check_data(progress)
            state = {"engine": engine_state}
            whole = _whole_tensors(state)
            if whole is None:
                from kge_torchrec.training import checkpoint_storage as storage

                storage.load(state, folder, index, single_rank=self.processes.world_size == 1)
            else:
                read_whole(folder, index, whole)
            if take is not None:
                take(folder, index, progress)
        except (StoreError, ConfigError):
            raise
        except Exception as error:
            _raise_if_rank_lost(error)
            raise CheckpointError(
                f"checkpoint {name} in {self.folder} cannot be read: {first_line(error)}"
            ) from error
        return progress

    def load_first(
        self,
        engine_state: dict[str, Any],
        names: list[str],
        take: Take | None = None,
        then: Callable[[str, TrainState], object] = lambda name, progress: None,
    ) -> tuple[str, TrainState]:
        """Load the first readable checkpoint of several; return its name and progress.

        Each unreadable checkpoint causes a warning.

        Args:
            engine_state: The state to fill in place.
            names: The checkpoints to try, in order.
            take: As for ``load``.
            then: Called with name and progress after the state is filled; it may load more.

        Raises:
            CheckpointError: No checkpoint is readable.  The message names all of them.
        """
        problems = []
        for name in names:
            try:
                progress = self.load(engine_state, name, take)
                then(name, progress)
                return name, progress
            except CheckpointError as error:
                problems.append(str(error))
                if self.processes.is_first and name != names[-1]:
                    log.warning("%s; trying another one", error)
        none = f"no readable checkpoint in {self.folder}: " if len(problems) > 1 else ""
        raise CheckpointError(none + "; ".join(problems))

    def progress(self, name: str) -> TrainState | None:
        """Return the progress stored with a checkpoint, or None if the checkpoint is damaged."""
        try:
            return on_first_rank(self.processes, lambda: open_checkpoint(self.folder / name))[1]
        except (OSError, Damaged):
            return None

    @staticmethod
    def recorded(run: Path) -> dict[str, Any] | None:
        """Return the names of the "newest" and the "best" checkpoint that a run has written.

        Returns:
            The names, or None if the run has written no checkpoint.
        """
        try:
            record = json.loads((run / _RECORD).read_text(encoding="utf-8"))
            return {"newest": str(record["newest"]), "best": record["best"]}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def best(self) -> str | None:
        """Return the name of the best checkpoint, or None without one.

        The newest readable checkpoint names the best one.  If an even newer checkpoint is missing,
        the run's record names it.  The best checkpoint may itself be missing or damaged.
        """
        names = self.names()
        recorded = on_first_rank(self.processes, lambda: self.recorded(self.folder.parent))
        if recorded and names and recorded["newest"] > names[-1]:
            return recorded["best"]
        states = (self.progress(name) for name in reversed(names))
        return next((progress.best_checkpoint for progress in states if progress), None)

    def order(self, which: str) -> list[str]:
        """Return the names of checkpoints to try, in order.

        It warns if the best or the newest checkpoint is missing.

        Args:
            which: BEST or NEWEST (the others follow, newest first), or a name (no others follow).

        Raises:
            CheckpointError: There are no checkpoints, or none of that name.
        """
        names = self.names()
        if not names:
            run = self.folder.parent
            recorded = on_first_rank(self.processes, lambda: self.recorded(run))
            if recorded:
                raise CheckpointError(
                    f"all checkpoints of {run} are missing (the newest was "
                    f"{recorded['newest']}): restore them, or train the run again"
                )
            raise no_checkpoint(run)
        if which not in (BEST, NEWEST):
            if which not in names:
                raise CheckpointError(
                    f"{self.folder.parent} has no checkpoint {which!r}; it has {', '.join(names)}"
                )
            return [which]
        recorded = on_first_rank(self.processes, lambda: self.recorded(self.folder.parent))
        best, newest = self.best(), max(names[-1], recorded["newest"] if recorded else "")
        requested = (best or newest) if which == BEST else newest
        first = requested if requested in names else names[-1]
        if self.processes.is_first and first != requested:
            log.warning(
                "the %s checkpoint of %s, %s, is missing; using %s instead",
                BEST if requested == best else NEWEST, self.folder.parent, requested, first,
            )  # fmt: skip
        return [first, *(name for name in reversed(names) if name != first)]

    def find(self, which: str) -> Path:
        """Return the path of the first checkpoint of ``order``, with its warnings and errors."""
        return self.folder / self.order(which)[0]

    def _check_data(self, progress: TrainState) -> None:
        if self.data and progress.data != self.data:
            raise StoreError(
                f"the triples at hand are not the ones that {self.folder.parent} was trained on, "
                "so its ids mean something else; restore the old triples"
            )

    def _names(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob(f"step-*/{MANIFEST}"))

    def _not_written(self, name: str, partial: Path, error: BaseException) -> str:
        def clean_up() -> str:
            shutil.rmtree(partial, ignore_errors=True)
            return ", ".join(self._names()) or "none"

        kept = on_first_rank(self.processes, clean_up)
        return (
            f"checkpoint {name} could not be written to {self.folder}: {first_line(error)} "
            f"({files.free_space(self.folder)} free on that disk); earlier checkpoints are intact: "
            f"{kept}. Free some disk space, then run `train --resume`."
        )

    def _prune(self, newest: str, best: str | None) -> None:
        """Remove checkpoints except the last ``keep`` up to ``newest``, and the best.

        Checkpoints newer than the one just written are damaged, or this run would have resumed
        from them.
        """
        names = self._names()
        until_now = [name for name in names if name <= newest]
        for name in names:
            if name not in (*until_now[-self.keep :], best, *self.held()):
                try:
                    shutil.rmtree(self.folder / name)
                except OSError as error:  # what training needs is already on disk
                    log.warning("an old checkpoint could not be removed: %s", error)


def _whole_tensors(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor] | None:
    """Return the tensors of a nested state by their names in an index.

    Returns:
        The tensors, or None if any of them is sharded.
    """
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            below = _whole_tensors(value, f"{prefix}{key}.")
            if below is None:
                return None
            tensors |= below
        elif type(value) in (Tensor, nn.Parameter):
            tensors[prefix + key] = value
        else:
            return None
    return tensors


def _raise_if_rank_lost(error: BaseException) -> None:
    """Raise the error again if the cause is a lost rank rather than the checkpoint."""
    if is_lost_connection(error):
        raise error
