"""Extends a run: adds new triples to its graph, and rows for new entities and relations.

store        the old and the new triples; old labels keep their ids
checkpoint   the old checkpoint with rows for new entities and relations
training     continues in the new run, on old and new triples
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError, GraphSize
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
from kge_torchrec.distributed.processes import Processes, on_all_ranks, on_first_rank, processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.init import CHUNK_ROWS, fill_rows
from kge_torchrec.environment import quiet_dependencies
from kge_torchrec.errors import DataError
from kge_torchrec.training.checkpoint_index import Damaged
from kge_torchrec.training.checkpoints import (
    CheckpointError,
    Checkpoints,
    no_checkpoint,
)
from kge_torchrec.training.copier import copied
from kge_torchrec.training.growth import GrownCheckpoint, check_numbers, shrink_checkpoint
from kge_torchrec.training.remote_runs import folder_of
from kge_torchrec.training.run_folder import STARTED, RunFolder
from kge_torchrec.training.runs import Extras, endings_named, lock, train_claimed

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
        new.store_and_checkpoint(new_triples, checkpoint, changes)
        new.complete()

    return _new_run(run, output, changes, extras, make)


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
    return _new_run(run, output, changes, extras, lambda new: new.delete(deleted, checkpoint))


def _new_run(
    run: str | Path,
    output: str | Path,
    changes: Changes,
    extras: Extras,
    make: Callable[[_Extension], None],
) -> RunFolder:
    """Make a new run from an old one, and continue its training.

    Args:
        run: The old run.
        output: The folder of the new run.
        changes: The differences of the new run.
        extras: What an application adds to a training.
        make: Writes store, checkpoint and config of the new run. Collective.
    """
    source, folder = folder_of(run), RunFolder(output)
    before = source.load_config()
    if before.train.epochs is None:  # it is in a race
        raise no_checkpoint(source.path)
    config = _config_of(before, folder, changes)
    with processes(config.device, config.timeout) as ranks, ExitStack() as held:
        lock(folder, ranks, held)
        new = _Extension(source, folder, before, config, ranks)
        try:
            with quiet_dependencies():
                make(new)
        except BaseException:
            if ranks.is_first:
                new.undo()
            raise
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
    """The steps that create the new run. Every method except ``undo`` is collective."""

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
        self._writing: GrownCheckpoint | None = None

    def store_and_checkpoint(
        self, new: Sources | Mapping[str, InMemory], checkpoint: str, changes: Changes
    ) -> None:
        """Create the new run's store and checkpoint; the new rows have initial values."""
        self._find(checkpoint)
        on_first_rank(self.processes, lambda: self._begin(new, changes))
        self.store = on_all_ranks(self.processes, lambda: TripleStore.open(self.folder.store))
        base = self.store.base
        assert base is not None  # extend_store has set it
        self.old: GraphSize = base
        if self.config.run.progress and self.processes.is_first:
            print(", ".join(f"{n:,} new {what}" for what, n in self.new.items()), file=sys.stderr)
        from kge_torchrec.training.assembly import entity_tables, start_objective  # loads TorchRec

        objective, init = start_objective(self.config, self.store.num_relations)
        self._tables = on_all_ranks(
            self.processes, lambda: entity_tables(self.config, self.store, init.zero_columns)
        )
        start = {name: p.detach() for name, p in objective.named_parameters()}
        self._write(start)

    @property
    def new(self) -> dict[str, int]:
        """The numbers of new entities, relations and training triples, and of new features."""
        size, old = self.store.size, self.old
        features = {"features": size.features - old.features} if size.features else {}
        return {
            "entities": size.entities - old.entities,
            "relations": size.relations - old.relations,
            "training triples": size.triples - old.triples,
            **features,
        }

    def _find(self, checkpoint: str) -> None:
        """Find the checkpoint that the new run starts from. Collective."""
        self.grown_from = Checkpoints(
            self.source.checkpoints, self.processes, self.before.checkpoint.keep
        ).find(checkpoint)

    def _base(self) -> TripleStore:
        """Return the old store, after a check of it and of the checkpoint; mark the new folder."""
        try:
            check_numbers(self.grown_from)
        except (OSError, Damaged) as error:
            raise CheckpointError(
                f"checkpoint {self.grown_from} cannot be read: {error}; extend another one by "
                "--checkpoint NAME"
            ) from error
        base = TripleStore.open(self.source.store_of(self.before.data.path))
        base.check()
        if self.folder.is_half_extended:
            self._clear()
        self.folder.check_free()
        self._began = True
        self.folder.save_extension({"from": str(self.source.path.resolve())})
        return base

    def _begin(self, new: Sources | Mapping[str, InMemory], changes: Changes) -> None:
        data, base = self.before.data, self._base()
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
        self._fingerprint = base.fingerprint

    def _drawn(self) -> Iterator[Tensor]:
        """Yield the initial rows of new entities, then those of new features.

        A run of the whole graph would draw the same ones.
        """
        features = _blocks(self.store.num_entities + self.old.features, self.store.num_rows)
        for first, count in itertools.chain(self._blocks(), features):
            rows = torch.empty(count, self.config.model.dim)
            shard = EntityShard(rows, first, self.store.num_rows)
            on_first_rank(self.processes, partial(self._fill, shard))
            yield rows

    def _fill(self, shard: EntityShard) -> None:
        for table in self._tables:
            fill_rows(shard, self.config.seed, table.init, table.ids)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first id and the size of consecutive blocks of new entities."""
        return _blocks(self.old.entities, self.store.num_entities)

    def _write(self, start: dict[str, Tensor]) -> None:
        """Write the new run's first checkpoint.

        ``start`` are parameters by name, with the values for rows of new relations.
        """
        ranks = self.processes

        def begin() -> None:
            self._writing = GrownCheckpoint(
                self.grown_from,
                self.folder.checkpoints,
                (self.old, self.store.size),
                self._tables,
                self._fingerprint,
            )

        def made() -> GrownCheckpoint:
            assert self._writing is not None  # only rank 0 calls this
            return self._writing

        try:
            on_first_rank(ranks, begin)
            for part in self._drawn():
                on_first_rank(ranks, partial(lambda part: made().add_rows(part), part))
            on_first_rank(ranks, lambda: made().finish(start, self.store.fingerprint))
        except (OSError, Damaged) as error:
            raise CheckpointError(
                f"{self.grown_from} could not be extended to {self.folder.checkpoints}: {error} "
                f"({files.free_space(self.folder.path)} free on that disk)"
            ) from error
        finally:
            if self._writing is not None:
                self._writing.discard()

    def complete(self) -> None:
        """Turn the folder into a run. Collective."""
        more = 0, self.new["entities"]  # new entities are not frozen
        on_first_rank(
            self.processes, lambda: self._finish({"new": self.new}, lambda old: np.pad(old, more))
        )

    def _finish(self, what: dict[str, Any], frozen: Callable[[np.ndarray], np.ndarray]) -> None:
        """Write what is new and which rows are frozen; config.yaml, the last, makes it a run."""
        origin = {"from": str(self.source.path.resolve()), "checkpoint": self.grown_from.name}
        self.folder.save_extension({**origin, **what})
        if self.config.model.vectors.frozen:
            self.folder.save_frozen(frozen(np.load(self.source.frozen)))
        self.folder.save_config(self.config)

    def undo(self) -> None:
        """Remove the new run's files if it could not be started."""
        if self._began:
            self._clear()
        elif self.folder.entries > {".lock"}:
            return
        self.folder.remove(STARTED)  # this call may have created the folder, only for the lock
        if not self.folder.entries and self.folder.path.is_dir():
            self.folder.path.rmdir()

    def _clear(self) -> None:
        """Remove the files of ``extend``, except the lock and the mark of an unfinished run."""
        shutil.rmtree(self.folder.store, ignore_errors=True)
        for store in self.folder.path.glob(f".{self.folder.store.name}.partial-*"):
            shutil.rmtree(store, ignore_errors=True)
        shutil.rmtree(self.folder.checkpoints, ignore_errors=True)

    def delete(self, labels: Labels, checkpoint: str) -> None:
        """Write the new run without some entities. Collective."""
        self._find(checkpoint)
        on_first_rank(self.processes, lambda: self._write_without(_labels(labels)))

    def _write_without(self, labels: list[str]) -> None:
        base = self._base()
        deleted = np.zeros(base.num_entities, bool)
        deleted[base.entities.ids(labels, exact=True)] = True
        store = write_without(base, deleted, self.folder.store)
        from kge_torchrec.training.assembly import entity_tables  # loads TorchRec

        tables, kept = entity_tables(self.before, base, 0), ~deleted
        if (before := base.features()) is not None:
            left = store.features()
            names = before.names.slice(0, 0) if left is None else left.names
            used = pc.is_in(before.names, value_set=names).to_numpy(zero_copy_only=False)
            kept = np.append(kept, used)
        try:
            shrink_checkpoint(
                self.grown_from, self.folder.checkpoints, kept, tables, store.fingerprint
            )
        except (OSError, Damaged) as error:
            raise CheckpointError(
                f"{self.grown_from} could not be written to {self.folder.checkpoints}: {error} "
                f"({files.free_space(self.folder.path)} free on that disk)"
            ) from error
        triples = sum(len(base.split(s)) - len(store.split(s)) for s in SPLITS)
        counts = {"entities": int(deleted.sum()), "triples": triples}
        self._finish({"deleted": counts}, lambda old: old[~deleted])


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the size of consecutive blocks of rows."""
    for first in range(start, stop, CHUNK_ROWS):
        yield first, min(CHUNK_ROWS, stop - first)


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
