"""Extends a run: adds new triples to its graph, and rows for new entities and relations.

store        the old and the new triples; old labels keep their ids
checkpoint   the first one of the new run: old rows by label, and initial values of new ones
training     continues in the new run, on old and new triples
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import (
    Facts,
    changed_keys,
    check_effects,
    check_resume,
    declared,
    key_of,
)
from kge_torchrec.config.model import INITIAL
from kge_torchrec.config.parser import Overrides, config_from_dict
from kge_torchrec.data import SPLITS
from kge_torchrec.data.prepare import extend_store
from kge_torchrec.data.readers.files import Sources
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.contents import write_without
from kge_torchrec.distributed.processes import (
    OtherRankFailed,
    Processes,
    on_all_ranks,
    on_first_rank,
    processes,
)
from kge_torchrec.environment import quiet_dependencies
from kge_torchrec.errors import DataError, StoreError
from kge_torchrec.training.checkpoint_files import Damaged
from kge_torchrec.training.checkpoints import (
    CheckpointError,
    Checkpoints,
    NonFiniteParameters,
    no_checkpoint,
)
from kge_torchrec.training.copier import copied
from kge_torchrec.training.remote_runs import folder_of
from kge_torchrec.training.run_folder import FILES, RunFolder
from kge_torchrec.training.runs import Extras, endings_named, free_memory, lock, train_claimed
from kge_torchrec.training.session import Session
from kge_torchrec.training.start import take_rows
from kge_torchrec.training.state import TrainState

Labels = str | Path | Sequence[str]  # a file with one label per line, or labels


@dataclass(frozen=True)
class Changes:
    """The differences of the new run; the attributes are arguments of ``api.extend``."""

    epochs: int | None = None
    freeze: bool = False
    allow_unseen_relations: bool = False
    features: str | Path | None = None
    overrides: Overrides = ()


def extend_run(
    run: str | Path,
    new_triples: Sources | Mapping[str, InMemory],
    output: str | Path,
    changes: Changes,
    checkpoint: str,
    extras: Extras,
) -> RunFolder:
    """Extend a run with new triples, and continue its training in a new run; see ``api.extend``."""

    def make(new: _Extension) -> None:
        new.add(new_triples, changes)

    return _new_run(run, output, changes, checkpoint, extras, make)


def delete_entities(
    run: str | Path,
    deleted: Labels,
    output: str | Path,
    changes: Changes,
    checkpoint: str,
    extras: Extras,
) -> RunFolder:
    """Write a new run without some entities and without their triples; see ``api.extend``."""
    changes = replace(changes, epochs=changes.epochs or 0)
    make = lambda new: new.remove(_labels(deleted))  # noqa: E731
    return _new_run(run, output, changes, checkpoint, extras, make)


def _new_run(
    run: str | Path,
    output: str | Path,
    changes: Changes,
    checkpoint: str,
    extras: Extras,
    make: Callable[[_Extension], None],
) -> RunFolder:
    """Make a new run from an old one, and continue its training.

    Args:
        run: The old run.
        output: The folder of the new run.
        changes: The differences of the new run.
        checkpoint: The checkpoint of the old run: "best", "newest" or a name.
        extras: What an application adds to a training.
        make: Writes the new store, on rank 0.
    """
    source, folder = folder_of(run), RunFolder(output)
    before = source.load_config()
    if before.train.epochs is None:  # it is in a race
        raise no_checkpoint(source)
    config = _config_of(before, folder, changes)
    with processes(config.device, config.timeout) as ranks, ExitStack() as held:
        lock(folder, ranks, held)
        new = _Extension(source, folder, before, config, ranks)
        try:
            with quiet_dependencies():
                new.write(checkpoint, make)
        except BaseException:
            if ranks.is_first:
                new.undo()
            raise
        free_memory()
        copied(folder, config, ranks, held)
        with endings_named(folder, ranks):
            train_claimed(folder, config, ranks, extras)
    return folder


def _config_of(before: Config, folder: RunFolder, changes: Changes) -> Config:
    """Return the config of the old run, adapted to the new folder and its store."""
    epochs = changes.epochs
    if epochs is None:
        epochs = -(-before.train.epochs // 10)
    model = before.model
    if not model.vectors.frozen:  # the checkpoint already contains the vectors
        model = replace(model, init_from=None, init_options={})
    old = {"freeze": "old" if changes.freeze else "none"}
    saving = {**before.checkpoint.options, "copy_to": None}  # the copy of the old run stays its own
    config = replace(
        before,
        checkpoint=replace(before.checkpoint, options=saving),
        data=replace(before.data, path=str(folder.store)),
        model=model,
        train=replace(before.train, epochs=epochs),
        run=replace(before.run, dir=str(folder.path), resume="never"),
    )
    values = config.to_dict()
    values["train"]["extension"] = old  # with the overrides: entities.placement may be among them
    changed = config_from_dict(values, changes.overrides)
    if changed.data != config.data or changed.run.dir != config.run.dir:
        raise ConfigError("extend sets data.* and run.dir of the new run itself; leave them out")
    initial = [name for name, item in declared(Config).items() if key_of(item).resume is INITIAL]
    check_resume(config, changed, folder.path, allowed=initial)  # new rows need initial values
    check_effects(changed, Facts(extended=True), changed_keys(config, changed))
    return changed


class _Extension:
    """The steps that create the new run."""

    def __init__(
        self,
        source: RunFolder,
        folder: RunFolder,
        before: Config,
        config: Config,
        processes: Processes,
    ):
        self.source, self.folder, self.processes = source, folder, processes
        self.before, self.config = before, config
        self._began = False
        self._report: dict[str, Any] = {}
        self._frozen: Callable[[np.ndarray], np.ndarray] = lambda old: old  # from old to new rows

    def write(self, checkpoint: str, make: Callable[[_Extension], None]) -> None:
        """Write the store, the first checkpoint and the config of the new run.  Collective."""
        ranks = self.processes
        checkpoints = Checkpoints(self.source.checkpoints, ranks)
        name = checkpoints.order(checkpoint)[0]
        with self._reading(name):
            opened = checkpoints.open(name)
        self._base = on_all_ranks(ranks, self._opened_base)
        if opened.progress.data != self._base.fingerprint:
            raise StoreError(
                f"{opened.folder} was trained on different triples than those of the store"
            )
        on_first_rank(ranks, lambda: self._begin(make))
        session = Session(self.config, self.folder, ranks)
        with self._reading(name):
            take_rows(session, opened, self._base)
        session.take_numbers(opened.progress)
        progress = TrainState(data=session.store.fingerprint)
        try:
            session.checkpoints.save(session.state(progress), progress)
        except NonFiniteParameters as error:
            raise CheckpointError(
                f"{str(error).partition(' (rank')[0]}, from checkpoint {name} of "
                f"{self.source.path} or as initial values; extend another one by --checkpoint NAME"
            ) from error
        if session.disk is not None:
            session.disk.close()
        on_first_rank(ranks, lambda: self._finish(name))

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Say which checkpoint cannot be read."""
        try:
            yield
        except (OSError, Damaged, OtherRankFailed) as error:
            raise CheckpointError(
                f"checkpoint {name} in {self.source.checkpoints} cannot be read: {error}; extend "
                "another one by --checkpoint NAME"
            ) from error

    def _opened_base(self) -> TripleStore:
        return TripleStore.open(self.source.store_of(self.before.data.path))

    def _begin(self, make: Callable[[_Extension], None]) -> None:
        """Check the old store, mark the new folder, and write the new store."""
        self._base.check()
        if self.folder.is_half_extended:
            self._clear()
        self.folder.check_free()
        self._began = True
        self.folder.save_extension({"from": str(self.source.path.resolve())})
        make(self)

    def add(self, new: Sources | Mapping[str, InMemory], changes: Changes) -> None:
        """Write the old and the new triples."""
        data, base = self.before.data, self._base
        extend_store(
            base,
            new,
            self.folder.store,
            replace(
                data,
                allow_unseen_relations=changes.allow_unseen_relations
                or data.allow_unseen_relations,
                features=None if changes.features is None else str(changes.features),
            ),
            progress=self.config.run.progress,
        )
        size, old = TripleStore.open(self.folder.store).size, base.size
        counts = {
            "entities": size.entities - old.entities,
            "relations": size.relations - old.relations,
            "training triples": size.triples - old.triples,
            **({"features": size.features - old.features} if size.features else {}),
        }
        if self.config.run.progress:
            print(", ".join(f"{n:,} new {what}" for what, n in counts.items()), file=sys.stderr)
        self._report = {"new": counts}
        self._frozen = lambda old: np.pad(old, (0, counts["entities"]))  # new ones are not frozen

    def remove(self, labels: list[str]) -> None:
        """Write the triples without some entities."""
        base = self._base
        deleted = np.zeros(base.num_entities, bool)
        deleted[base.entities.ids(labels, exact=True)] = True
        store = write_without(base, deleted, self.folder.store)
        triples = sum(len(base.split(s)) - len(store.split(s)) for s in SPLITS)
        self._report = {"deleted": {"entities": int(deleted.sum()), "triples": triples}}
        self._frozen = lambda old: old[~deleted]

    def _finish(self, checkpoint: str) -> None:
        """Write what is new and which rows are frozen; config.yaml, the last, makes it a run."""
        origin = {"from": str(self.source.path.resolve()), "checkpoint": checkpoint}
        self.folder.save_extension({**origin, **self._report})
        if self.config.model.vectors.frozen:
            self.folder.save_frozen(self._frozen(np.load(self.source.frozen)))
        self.folder.save_config(self.config)

    def undo(self) -> None:
        """Remove the new run's files if it could not be started."""
        if self._began:
            self._clear()
        elif self.folder.entries > {".lock"}:
            return
        self.folder.remove(FILES)  # this call may have created the folder, only for the lock
        if not self.folder.entries and self.folder.path.is_dir():
            self.folder.path.rmdir()

    def _clear(self) -> None:
        """Remove the files of ``extend``, except the lock and the mark of an unfinished run."""
        for name in ("store", "checkpoints", "parts"):
            shutil.rmtree(self.folder.path / name, ignore_errors=True)
        for store in self.folder.path.glob(f".{self.folder.store.name}.partial-*"):
            shutil.rmtree(store, ignore_errors=True)


def _labels(labels: Labels) -> list[str]:
    """Return labels, or those of a file with one per line, each once."""
    if isinstance(labels, str | Path):
        try:
            lines = Path(labels).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{labels}: not readable as a file of labels: {error}") from error
        labels = [line for line in lines if line.strip()]
    if not labels:
        raise DataError("no entities to delete: give the label of at least one, one per line")
    return list(dict.fromkeys(labels))
