"""Extends a run: adds new triples to its graph, and rows for new entities and relations.

store        the old and the new triples; old labels keep their ids
checkpoint   the old checkpoint with rows for new entities and relations
placement    optional: moves the new rows to fit their triples
training     continues in the new run, on old and new triples
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kge_torchrec import api, files
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
from kge_torchrec.data.prepare import extend_store
from kge_torchrec.data.readers import Sources, make_reader
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes, on_all_ranks, on_first_rank, processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.init import CHUNK_ROWS, EntityInit, fill_rows
from kge_torchrec.environment import quiet_dependencies
from kge_torchrec.growth.placement import Placement, place
from kge_torchrec.trained_run import Run
from kge_torchrec.training.checkpoint_index import Damaged
from kge_torchrec.training.checkpoints import BEST, NEWEST, CheckpointError, Checkpoints
from kge_torchrec.training.growth import GrownCheckpoint, check_numbers
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session

if TYPE_CHECKING:
    from kge_torchrec.training.trainer import Callback


def extend(
    run: str | Path,
    new_triples: Sources | Mapping[str, InMemory],
    output: str | Path,
    *,
    epochs: int | None = None,
    freeze: bool = False,
    replay: float = 1.0,
    place: bool = False,
    checkpoint: str = BEST,
    allow_unseen_relations: bool = False,
    overrides: Overrides = (),
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Extend a run with new triples, and continue its training in a new run.

    Old labels keep their ids, rows and optimizer state. New rows get the initial values that a
    run with this graph and seed draws, without optimizer state. Under torchrun, all ranks call
    this function.

    If the process is killed before the first checkpoint is complete, the same call starts over.
    After that, ``resume`` continues the training. The entry "extended" of the new results.json
    describes the new data, how far old rows have moved, and the placement. Training can also raise
    the errors of ``train``.

    Args:
        run: The folder of the old run, which is not changed.
        new_triples: Files in the formats of ``prepare``, or splits in memory, {"train": triples,
            ...}. A file or table without a split is used for training.
        output: The folder of the new run.
        epochs: The epochs to train. None: a tenth of the old run's epochs, or 0 with ``place``.
        freeze: Keep old entities, old relations and all other parameters bit for bit
            (train.freeze old).
        replay: The share of old triples per epoch (train.replay); 0 trains only on new triples.
        place: First move the rows of new entities and relations to fit their triples, with all
            other parameters fixed; see ``placement``.
        checkpoint: The checkpoint to extend: "best", "newest" or a name.
        allow_unseen_relations: Accept new relations without a training triple.
        overrides: Other config keys, such as {"train.lr": 0.01}.
        callbacks: Callbacks of the training.

    Returns:
        The new run.

    Raises:
        DataError: The new triples cannot be used.
        ConfigError: An option is invalid.
        CheckpointError: The checkpoint cannot be extended.
    """
    source, folder = RunFolder(run), RunFolder(output)
    before = source.load_config()
    config = _config_of(before, folder, epochs, freeze, replay, place, overrides)
    with processes(config.device, config.timeout) as ranks, ExitStack() as held:
        api.lock(folder, ranks, held)
        made = _Extension(source, folder, before, config, ranks)
        try:
            with quiet_dependencies():
                made.store_and_checkpoint(new_triples, checkpoint, allow_unseen_relations)
                made.complete(made.place() if place else None)
        except BaseException:
            if ranks.is_first:
                made.undo()
            raise
        with api.interrupts_named(folder, config):
            api.go_on(folder, config, ranks, callbacks)
    return Run(folder.path)


def _config_of(
    before: Config,
    folder: RunFolder,
    epochs: int | None,
    freeze: bool,
    replay: float,
    place: bool,
    overrides: Overrides,
) -> Config:
    """Return the config of the old run, adapted to the new folder and its store."""
    if epochs is None:
        epochs = 0 if place else -(-before.train.epochs // 10)
    kept, model = "old" if freeze else "none", before.model
    if not model.vectors().frozen:  # the checkpoint already contains the vectors
        model = replace(model, init_from=None, init_options={})
    config = replace(
        before,
        data=replace(before.data, path=str(folder.store)),
        model=model,
        train=replace(before.train, epochs=epochs, freeze=kept, replay=replay),
        # The plan of the old run is for a smaller table.
        run=replace(before.run, dir=str(folder.path), resume="never", plan=None),
    )
    changed = config_from_dict(config.to_dict(), overrides)
    if changed.data != config.data or changed.run.dir != config.run.dir:
        raise ConfigError("extend sets data.* and run.dir of the new run itself; leave them out")
    initial = [name for name, item in declared(Config).items() if key_of(item).resume is INITIAL]
    check_resume(config, changed, folder.path, allowed=initial)  # new rows need initial values
    check_effects(changed, Facts(extended=True), changed_keys(config, changed))
    if not changed.checkpoint.keep:
        raise ConfigError("checkpoint.keep 0 would drop what is extended; set it to 1 or more")
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
        self, new: Sources | Mapping[str, InMemory], checkpoint: str, allow_unseen: bool
    ) -> None:
        """Create the new run's store and checkpoint; the new rows have initial values."""
        self.grown_from = Checkpoints(
            self.source.checkpoints, self.processes, self.before.checkpoint.keep
        ).find(checkpoint)
        on_first_rank(self.processes, lambda: self._begin(new, allow_unseen))
        self.store = on_all_ranks(self.processes, lambda: TripleStore.open(self.folder.store))
        base = self.store.base
        assert base is not None  # extend_store has set it
        self.old: GraphSize = base
        if self.config.run.progress and self.processes.is_first:
            print(", ".join(f"{n:,} new {what}" for what, n in self.new.items()), file=sys.stderr)
        from kge_torchrec.training.assembly import start_objective  # loads TorchRec

        objective, init = start_objective(self.config, self.store.num_relations)
        start = {name: p.detach() for name, p in objective.named_parameters()}
        self._write(self._drawn(init), start)

    @property
    def new(self) -> dict[str, int]:
        """The numbers of new entities, relations and training triples."""
        size, old = self.store.size, self.old
        return {
            "entities": size.entities - old.entities,
            "relations": size.relations - old.relations,
            "training triples": size.triples - old.triples,
        }

    def _begin(self, new: Sources | Mapping[str, InMemory], allow_unseen: bool) -> None:
        data = self.before.data
        try:
            check_numbers(self.grown_from)
        except (OSError, Damaged) as error:
            raise CheckpointError(
                f"checkpoint {self.grown_from} cannot be read: {error}; extend another one by "
                "--checkpoint NAME"
            ) from error
        base = TripleStore.open(self.source.store_of(data.path))
        base.check()
        if self.folder.is_half_extended:
            self._clear()
        self.folder.check_free()
        self._began = True
        self.folder.save_extension({"from": str(self.source.path.resolve())})
        extend_store(
            base,
            new,
            self.folder.store,
            **asdict(data.file_options()),
            allow_unseen_relations=allow_unseen or data.allow_unseen_relations,
            reader=make_reader(data.reader, data.reader_options, "data.reader_options"),
            progress=self.config.run.progress,
        )
        self._fingerprint = base.fingerprint

    def _drawn(self, init: EntityInit) -> Iterator[Tensor]:
        """Yield the initial rows of new entities, as a run of the whole graph would draw them."""
        for first, count in self._blocks():
            rows = torch.empty(count, self.config.model.dim)
            shard = EntityShard(rows, first, self.store.num_entities)
            fill = partial(fill_rows, shard, self.config.seed, init)
            on_first_rank(self.processes, fill)
            yield rows

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first id and the size of consecutive blocks of new entities."""
        for first in range(self.old.entities, self.store.num_entities, CHUNK_ROWS):
            yield first, min(CHUNK_ROWS, self.store.num_entities - first)

    def _write(self, rows: Iterator[Tensor], start: dict[str, Tensor]) -> None:
        """Write the new run's first checkpoint.

        Args:
            rows: Blocks of the new entities' rows. Only rank 0's are used.
            start: Parameters by name, with the values for rows of new relations.
        """
        ranks = self.processes

        def begin() -> None:
            self._writing = GrownCheckpoint(
                self.grown_from,
                self.folder.checkpoints,
                self.old,
                self.store.size,
                self._fingerprint,
            )

        def made() -> GrownCheckpoint:
            assert self._writing is not None  # only rank 0 calls this
            return self._writing

        try:
            on_first_rank(ranks, begin)
            for part in rows:
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

    def place(self) -> Placement:
        """Place the new rows, and write the checkpoint again with them."""
        session = Session(self.config, self.folder, self.processes, trains=False)
        session.restore_parameters(NEWEST)
        placed = place(session, self.old)
        shard = session.backend.shard()
        rows = (shard.fetch(torch.arange(a, a + n)).cpu() for a, n in self._blocks())
        scorer = {f"scorer.{name}": p.detach() for name, p in session.scorer.named_parameters()}
        self._write(rows, scorer)
        return placed

    def complete(self, placed: Placement | None) -> None:
        """Turn the folder into a run by writing config.yaml last."""

        def write() -> None:
            self.folder.save_extension(
                {
                    "from": str(self.source.path.resolve()),
                    "checkpoint": self.grown_from.name,
                    "entities": self.old.entities,
                    "new": self.new,
                    "placed": None if placed is None else asdict(placed),
                }
            )
            self.folder.save_resolved(self.source.load_resolved())
            if self.config.model.vectors().frozen:  # new entities are not frozen
                frozen = np.load(self.source.frozen)
                self.folder.save_frozen(np.pad(frozen, (0, self.new["entities"])))
            self.folder.save_config(self.config)

        on_first_rank(self.processes, write)

    def undo(self) -> None:
        """Remove the new run's files if it could not be started."""
        if self._began:
            self._clear()
            api.undo(self.folder)
        elif {file.name for file in self.folder.path.iterdir()} <= {".lock"}:
            api.undo(self.folder)  # this call created the folder, only for the lock

    def _clear(self) -> None:
        """Remove the files of ``extend``, except the lock and the mark of an unfinished run."""
        shutil.rmtree(self.folder.store, ignore_errors=True)
        for store in self.folder.path.glob(f".{self.folder.store.name}.partial-*"):
            shutil.rmtree(store, ignore_errors=True)
        shutil.rmtree(self.folder.checkpoints, ignore_errors=True)
