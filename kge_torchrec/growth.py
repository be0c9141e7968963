"""Extends a run: adds new triples to its graph, and rows for new entities and relations.

The store has the old and the new triples, and old labels keep their ids.  Training then starts from
rows of the old run by label (``training.start``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import (
    changed_keys,
    check_effects,
    check_resume,
    declared,
)
from kge_torchrec.config.model import INITIAL, Vectors
from kge_torchrec.config.parser import Overrides, config_from_dict
from kge_torchrec.config.training import SELECTION
from kge_torchrec.data.prepare import extend_store
from kge_torchrec.data.readers.files import Sources
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.contents import write_without
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.errors import DataError
from kge_torchrec.trained_run import Run
from kge_torchrec.training.checkpoints import BEST, Checkpoints, no_checkpoint
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.runs import Extras, train_run

if TYPE_CHECKING:
    from kge_torchrec.training.trainer import Callback


def extend(
    run: str | Path,
    new_triples: Sources | Mapping[str, InMemory] | None,
    output: str | Path,
    *,
    delete: str | Path | Sequence[str] | None = None,
    epochs: int | None = None,
    freeze: bool = False,
    checkpoint: str = BEST,
    allow_unseen_relations: bool = False,
    features: str | Path | None = None,
    overrides: Overrides = (),
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Extend a run with new triples, and continue its training in a new run.

    Old labels keep their ids, rows and optimizer state. New rows get the initial values that a
    run with this graph and seed draws. The entry "extended" of the new results.json describes the
    new data. If the process is killed, ``resume`` continues the new run; before its triples were
    complete, the same call starts over.

    With ``delete``, the new run lacks these entities: their rows, their triples and their labels.
    The other entities keep their order and rows, so their ids may fall.

    Args:
        run: The folder of the old run, which is not changed.
        new_triples: Files in the formats of ``prepare``, or splits in memory, {"train": triples,
            ...}. A file or table without a split is used for training. None with ``delete``.
        output: The folder of the new run.
        delete: Entities to delete: labels, or a file with one label per line.
        epochs: The epochs to train. None: a tenth of the old run's epochs, or 0 with ``delete``.
        freeze: Keep old entities, old relations and all other parameters bit for bit.
        checkpoint: The checkpoint to extend: "best", "newest" or a name.
        allow_unseen_relations: Accept new relations without a training triple.
        features: A file of features, as for ``prepare``. Other entities keep theirs.
        overrides: Other config keys, such as {"train.lr": 0.01}.
        callbacks: Callbacks of the training.

    Raises:
        DataError, ConfigError, CheckpointError: Triples, an option or the checkpoint is unusable.
        Exception: All errors of ``train``.
    """
    if delete is not None and new_triples is not None:
        raise ConfigError("delete entities first, then extend the run without them")
    if delete is None and new_triples is None:
        raise ConfigError("give new triples, or entities to delete")
    if delete is not None and (freeze or allow_unseen_relations or features):
        raise ConfigError("delete: freeze, features and unseen relations are of new rows")
    source = RunFolder(run)
    before = source.load_config()
    if before.train.epochs is None:  # it is in a race
        raise no_checkpoint(source)
    if epochs is None:
        epochs = -(-before.train.epochs // 10) if delete is None else 0

    def write(config: Config, folder: RunFolder, name: str) -> None:
        """Write extended.json, then the new store, which completes the start of the run."""
        base = TripleStore.open(source.store_of(before.data.path))
        base.check()
        origin = {"from": str(source.path.resolve()), "checkpoint": name}
        files.write_json(folder.extension, origin)
        path = Path(config.data.path)
        if delete is not None:
            gone = np.zeros(base.num_entities, bool)
            gone[base.entities.ids(_labels(delete), exact=True)] = True
            write_without(base, gone, path)
        else:
            assert new_triples is not None  # as checked above
            unseen = allow_unseen_relations or config.data.allow_unseen_relations
            file = None if features is None else str(features)
            data = replace(config.data, allow_unseen_relations=unseen, features=file)
            extend_store(base, new_triples, path, data, progress=config.run.progress)

    def choose(config: Config, folder: RunFolder, ranks: Processes) -> Config:
        name = Checkpoints(source.checkpoints, ranks).order(checkpoint)[0]
        on_first_rank(ranks, lambda: write(config, folder, name))
        return config

    config = _config_of(before, RunFolder(output), epochs, freeze, overrides)
    return Run(train_run(config, Extras(callbacks, choose=choose, is_checked=True)).path)


def _config_of(
    before: Config, folder: RunFolder, epochs: int, freeze: bool, overrides: Overrides
) -> Config:
    """Return the config of the old run, adapted to the new folder and its store."""
    model = before.model
    if not model.init_options.frozen:  # the checkpoint already contains the vectors
        model = replace(model, init_from=None, init_options=Vectors())
    old = {"freeze": "old" if freeze else "none"}
    saving = replace(before.checkpoint.options, copy_to=None)  # the copy stays the old run's
    config = replace(
        before,
        checkpoint=replace(before.checkpoint, options=saving),
        data=replace(before.data, path=os.path.abspath(folder.store)),
        model=model,
        train=replace(before.train, epochs=epochs),
        run=replace(before.run, dir=str(folder.path), resume="never"),
    )
    values = config.to_dict()
    values["train"]["extension"] = old  # with the overrides: entities.placement may be among them
    changed = config_from_dict(values, overrides)
    if changed.data != config.data or changed.run.dir != config.run.dir:
        raise ConfigError("extend sets data.* and run.dir of the new run itself; leave them out")
    free = INITIAL, SELECTION  # new rows need initial values, and validations begin anew
    allowed = [name for name, item in declared(Config).items() if item.resume in free]
    check_resume(config, changed, folder.path, allowed=allowed)
    later = {"train.extension.freeze"}  # the store that it needs is not there yet
    check_effects(changed, sorted({*changed_keys(config, changed)} - later))
    return changed


def _labels(labels: str | Path | Sequence[str]) -> list[str]:
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
