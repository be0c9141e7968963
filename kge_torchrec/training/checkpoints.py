"""The checkpoints of a run: folders that are complete or absent; the last k and the best are kept.

Each rank writes its rows into a file of a hidden folder, and rank 0 then the manifest, and renames
the folder, so a crash or a full disk does not affect earlier checkpoints.  Rank 0 lists the folder
for all ranks, because hosts may see different listings of a network disk.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from kge_torchrec import files
from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import (
    Processes,
    Rows,
    is_lost_connection,
    on_all_ranks,
    on_first_rank,
)
from kge_torchrec.environment import available_memory
from kge_torchrec.errors import KGEError, StoreError, first_line
from kge_torchrec.lines import say
from kge_torchrec.training.checkpoint_files import (
    MANIFEST,
    THREADS,
    Checkpoint,
    Damaged,
    NotFinite,
    is_finite,
    write_manifest,
    write_rows,
)
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.state import TrainState

BEST, NEWEST = "best", "newest"  # accepted in place of a checkpoint's name
SMALL = 64 << 20  # bytes of a rank that are written about as fast as they are copied
KEY, GIB = "checkpoint.options.background", 2**30
log = logging.getLogger(__name__)


class CheckpointError(KGEError, RuntimeError):
    """A checkpoint could not be written or read; the message says which one and why."""

    on_every_rank = True


class NonFiniteParameters(KGEError, RuntimeError):
    """A parameter or its optimizer state has NaN or infinity; the message says which."""

    on_every_rank = True


def no_checkpoint(run: RunFolder, remedy: str = "train the run again") -> CheckpointError:
    """Return the error for a run that has no checkpoint, or lost all of them."""
    if newest := run.last_written:
        return CheckpointError(
            f"all checkpoints of {run.path} are missing; the newest was {newest}. Restore them, "
            f"or {remedy}"
        )
    return CheckpointError(f"{run.path} has no checkpoint yet: train it first")


def name_of(progress: TrainState) -> str:
    """Return the name of the checkpoint at this progress."""
    return f"step-{progress.global_step:012d}"


def names_in(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints in a folder, oldest first."""
    return sorted(path.parent.name for path in folder.glob(f"step-*/{MANIFEST}"))


class Checkpoints:
    """The ``checkpoints`` folder of a run.  Every method is collective but ``closing``.

    ``keep`` is how many are kept besides the best one; loading compares ``data``, the fingerprint
    of the current store, with that of the checkpoint.
    """

    def __init__(self, folder: Path, processes: Processes, keep: int = 2, data: str = ""):
        self.folder, self.processes, self.keep, self.data = folder, processes, keep, data
        # Of rank 0: called when a checkpoint is complete, and names that pruning leaves.
        self.completed: Callable[[], object] = lambda: None
        self.held: Callable[[], Collection[str]] = tuple
        self._waits = False  # whether it was said that training waits
        self._writing: _Writing | None = None

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, oldest first."""
        return on_first_rank(self.processes, lambda: names_in(self.folder))

    def save(
        self, state: Sequence[Rows], progress: TrainState, background: bool = False
    ) -> dict[str, Any] | None:
        """Write this rank's rows; return figures, or None if a thread writes them until ``settle``.

        Raises:
            CheckpointError: The checkpoint cannot be written.  Earlier checkpoints are intact.
            NonFiniteParameters: A tensor has NaN or infinity.
        """
        self.settle()
        ranks, name = self.processes, name_of(progress)
        partial = self._partial(name)
        own = [rows for rows in state if not rows.is_replica]
        with self._failing_together(name):
            replicas = (rows for rows in state if rows.is_replica)
            bad = next((rows.name for rows in replicas if not is_finite(rows.local)), None)
            _raise_not_finite(ranks.gather(bad))
            on_first_rank(ranks, lambda: _make_empty(partial))
            copies = background and self._copies(own)
            progress = TrainState(**progress.to_dict())  # training continues to change it
            file = partial / f"rank-{ranks.rank:05d}.safetensors"
            self._writing = _Writing(name, progress, file, own, copies)
        return None if copies else self.settle()

    def settle(self, waits: bool = True) -> dict[str, Any] | None:
        """Complete the checkpoint that is being written, and return its figures.

        None if there is none, or, unless it ``waits``, if a rank still writes.
        """
        writing, ranks = self._writing, self.processes
        if writing is None:
            return None
        with self._failing_together(writing.name):
            if waits:
                writing.done.wait()
            elif ranks.largest([not writing.done.is_set()])[0]:
                return None
            self._writing = None
            results = ranks.gather(writing.result)
            _raise_not_finite([result.get("nan") for result in results])
            for rank, result in enumerate(results):
                if "error" in result:
                    raise RuntimeError(f"rank {rank}: {result['error']}")
            on_first_rank(ranks, lambda: self._complete(writing, results))
        return {
            "name": writing.name,
            "epoch": writing.progress.epoch,
            "seconds": round(max(result["seconds"] for result in results), 3),
            "extra_memory_bytes": sum(result["copied"] for result in results),
        }

    def _copies(self, own: list[Rows]) -> bool:
        """Return whether it is worth it to copy the rows, and they fit into memory.  Collective."""
        size = sum(rows.local.nbytes for rows in own)
        largest, least_free = self.processes.largest([size, -available_memory()])
        needed, free = int(largest) * self.processes.local_world_size, -int(least_free)
        if largest >= SMALL and needed > free and not self._waits:
            self._waits = True
            say(
                "training waits while checkpoints are written: a second copy of "
                f"{needed / GIB:,.2f} GiB does not fit into {free / GIB:,.2f} GiB of free memory "
                f"({KEY})"
            )
        return largest >= SMALL and needed <= free

    def _complete(self, writing: _Writing, results: list[dict[str, Any]]) -> None:
        """Write the manifest, give the checkpoint its name, and remove old ones."""
        tensors: dict[str, list[Any]] = {}
        for result in results:
            for tensor, pieces in result["pieces"].items():
                tensors.setdefault(tensor, []).extend(pieces)
        partial = self._partial(writing.name)
        write_manifest(partial, writing.progress, tensors)
        files.put_in_place(partial, self.folder / writing.name)  # or one from before a resume
        self._prune(writing.name, writing.progress.best_checkpoint)
        self.completed()

    @contextmanager
    def _failing_together(self, name: str) -> Iterator[None]:
        """Turn an error of all ranks into a CheckpointError, and remove what was written."""
        try:
            yield
        except Exception as error:
            if is_lost_connection(error):
                raise
            self._writing = None
            kept = on_first_rank(self.processes, lambda: self._clean_up(name))
            if isinstance(error, NonFiniteParameters):
                raise
            raise CheckpointError(
                f"checkpoint {name} could not be written to {self.folder}: {first_line(error)} "
                f"({files.free_space(self.folder)} free on that disk); earlier checkpoints are "
                f"intact: {kept}. Free some disk space, then run `train --resume`."
            ) from error

    def _clean_up(self, name: str) -> str:
        shutil.rmtree(self._partial(name), ignore_errors=True)
        return ", ".join(names_in(self.folder)) or "none"

    def _partial(self, name: str) -> Path:
        return self.folder / f".partial-{name}"

    @contextmanager
    def closing(self) -> Iterator[None]:
        """End the writing of the last checkpoint with an error of the block.  Not collective.

        The checkpoint is completed if all ranks raise the error, and given up otherwise.
        """
        try:
            yield
        except BaseException as error:
            alike = self.processes.world_size == 1 or getattr(error, "on_every_rank", False)
            if isinstance(error, Exception) and alike and not is_lost_connection(error):
                with suppress(KGEError):  # the first error says why training ends
                    self.settle()
            self._writing = None  # its thread goes on or ends with the process
            raise

    def load(
        self, names: Sequence[str], rows_of: Callable[[Checkpoint], Iterable[Rows]]
    ) -> Checkpoint:
        """Fill rows from the first readable checkpoint of several; return it.

        Each unreadable checkpoint causes a warning.  Some rows may have been filled from it.
        ``rows_of`` returns this rank's rows to fill, or raises ConfigError.

        Raises:
            CheckpointError: No checkpoint is readable.  The message names all of them.
            StoreError: The checkpoint was trained on other triples.
        """
        problems = []
        for name in names:
            try:
                return self._load(name, rows_of)
            except (StoreError, ConfigError):
                raise
            except Exception as error:
                if is_lost_connection(error):
                    raise
                cause = error
                problems.append(
                    f"checkpoint {name} in {self.folder} cannot be read: {first_line(error)}"
                )
                if self.processes.is_first and name != names[-1]:
                    log.warning("%s; trying another one", problems[-1])
        none = f"no readable checkpoint in {self.folder}: " if len(problems) > 1 else ""
        raise CheckpointError(none + "; ".join(problems)) from cause

    def _load(self, name: str, rows_of: Callable[[Checkpoint], Iterable[Rows]]) -> Checkpoint:
        checkpoint = self.open(name)
        if self.data and checkpoint.progress.data != self.data:
            raise StoreError(
                f"the triples at hand are not the ones that {self.folder.parent} was trained on, "
                "so its ids mean something else; restore the old triples"
            )
        on_all_ranks(self.processes, lambda: checkpoint.fill(rows_of(checkpoint)))
        return checkpoint

    def open(self, name: str) -> Checkpoint:
        """Open a checkpoint; raise Damaged or OSError if it cannot be read."""
        return on_first_rank(self.processes, lambda: Checkpoint.open(self.folder / name))

    def best(self) -> str | None:
        """Return the name of the best checkpoint, or None without one; it may be missing.

        The newest readable checkpoint names it.
        """
        for name in reversed(self.names()):
            with suppress(OSError, Damaged):
                return self.open(name).progress.best_checkpoint
        return None

    def order(self, which: str) -> list[str]:
        """Return the names of checkpoints to try, in order; warn if the best one is missing.

        After BEST or NEWEST the others follow, newest first.  Raises CheckpointError without any.
        """
        names, run = self.names(), RunFolder(self.folder.parent)
        if not names:
            raise on_first_rank(self.processes, lambda: no_checkpoint(run))
        if which not in (BEST, NEWEST):
            if which not in names:
                raise CheckpointError(
                    f"{run.path} has no checkpoint {which!r}; it has {', '.join(names)}"
                )
            return [which]
        first, best = names[-1], self.best() if which == BEST else None
        if best in names:
            first = best
        elif best is not None and self.processes.is_first:
            log.warning(
                "the best checkpoint of %s, %s, is missing; using %s instead", run.path, best, first
            )
        return [first, *(name for name in reversed(names) if name != first)]

    def _prune(self, newest: str, best: str | None) -> None:
        """Remove checkpoints except the best and the last ``keep`` up to ``newest``.

        Those that are newer are damaged, or this run would have resumed from them.
        """
        names = names_in(self.folder)
        until_now = [name for name in names if name <= newest]
        for name in names:
            if name not in (*until_now[-self.keep :], best, *self.held()):
                try:
                    shutil.rmtree(self.folder / name)
                except OSError as error:  # what training needs is already on disk
                    log.warning("an old checkpoint could not be removed: %s", error)


class _Writing:
    """This rank's file of one checkpoint, which is written here or by a thread.

    Attributes:
        result: {"pieces", "seconds", "copied"}, {"nan": name} or {"error": text}, once ``done``.
    """

    def __init__(self, name: str, progress: TrainState, file: Path, own: list[Rows], copies: bool):
        self.name, self.progress, self._copies = name, progress, copies
        self.done, self.result = threading.Event(), dict[str, Any]()
        if copies:
            try:
                rows = [_copy(item) for item in own]
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                threading.Thread(target=self._write, args=(file, rows, 1), daemon=True).start()
            except Exception as error:  # such as no memory; other ranks learn of it in ``settle``
                self.result = {"error": first_line(error)}
                self.done.set()
        else:
            self._write(file, own, THREADS)

    def _write(self, file: Path, rows: list[Rows], threads: int) -> None:
        begun = time.perf_counter()
        try:
            pieces = write_rows(file, rows, threads)
            copied = sum(item.local.nbytes for item in rows) if self._copies else 0
            seconds = time.perf_counter() - begun
            self.result = {"pieces": pieces, "seconds": seconds, "copied": copied}
        except NotFinite as error:
            self.result = {"nan": str(error)}
        except Exception as error:
            self.result = {"error": first_line(error)}
        self.done.set()


def _copy(rows: Rows) -> Rows:
    """Return rows with a copy of their values in main memory, pinned for those of a GPU."""
    values, copy = rows.local, None
    if values.is_cuda:
        with suppress(RuntimeError):  # not that much memory can be pinned
            copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy = torch.empty(values.shape, dtype=values.dtype) if copy is None else copy
    return rows._replace(local=copy.copy_(values, non_blocking=values.is_cuda))


def _raise_not_finite(names: Sequence[str | None]) -> None:
    """Raise NonFiniteParameters if a rank names a tensor with NaN or infinity."""
    for rank, name in enumerate(names):
        if name is not None:
            raise NonFiniteParameters(
                f"{name} holds NaN or infinity (rank {rank}); training stops, the last good "
                "checkpoint is kept. A smaller train.lr or model.init_scale, or train.clip.norm, "
                "usually helps."
            )


def _make_empty(folder: Path) -> None:
    """Make an empty folder, and remove unfinished checkpoints of killed runs."""
    for leftover in folder.parent.glob(".partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # a thread of an interrupted run may write yet
    folder.mkdir(parents=True)
