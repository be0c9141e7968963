"""Extends a run: adds new triples to its graph, and rows for new entities and relations.

The store has the old and the new triples, and old labels keep their ids.  Training then starts from
rows of the old run by label (``training.start``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from kge_torchrec.config.model import INITIAL, Vectors
from kge_torchrec.config.parser import Overrides, config_from_dict
from kge_torchrec.data import SPLITS
from kge_torchrec.data.prepare import extend_store
from kge_torchrec.data.readers.files import Sources
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.contents import write_without
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.errors import DataError
from kge_torchrec.lines import say
from kge_torchrec.training.checkpoints import Checkpoints, no_checkpoint
from kge_torchrec.training.remote_runs import folder_of
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.runs import Extras, train_run

Labels = str | Path | Sequence[str]  # a file with one label per line, or labels
# Writes the new store, on rank 0, from the old one and the config of the new run.  It returns what
# is new, for extended.json.
Write = Callable[[TripleStore, Config], dict[str, Any]]


def adding(
    new_triples: Sources | Mapping[str, InMemory],
    allow_unseen_relations: bool,
    features: str | Path | None,
) -> Write:
    """Return how to write the old and new triples; see ``api.extend``."""

    def write(base: TripleStore, config: Config) -> dict[str, Any]:
        unseen = allow_unseen_relations or config.data.allow_unseen_relations
        file = None if features is None else str(features)
        data = replace(config.data, allow_unseen_relations=unseen, features=file)
        extend_store(base, new_triples, Path(data.path), data, progress=config.run.progress)
        size, old = TripleStore.open(data.path).size, base.size
        counts = {
            "entities": size.entities - old.entities,
            "relations": size.relations - old.relations,
            "training triples": size.triples - old.triples,
            **({"features": size.features - old.features} if size.features else {}),
        }
        say(", ".join(f"{n:,} new {what}" for what, n in counts.items()), values=counts)
        return {"new": counts}

    return write


def without(labels: Labels) -> Write:
    """Return how to write the triples without some entities; see ``api.extend``."""

    def write(base: TripleStore, config: Config) -> dict[str, Any]:
        gone = np.zeros(base.num_entities, bool)
        gone[base.entities.ids(_labels(labels), exact=True)] = True
        store = write_without(base, gone, Path(config.data.path))
        triples = sum(len(base.split(s)) - len(store.split(s)) for s in SPLITS)
        return {"deleted": {"entities": int(gone.sum()), "triples": triples}}

    return write


def extend_run(
    run: str | Path,
    write: Write,
    output: str | Path,
    epochs: int | None,
    freeze: bool,
    checkpoint: str,
    overrides: Overrides,
    extras: Extras,
) -> RunFolder:
    """Make a new run from an old one, and continue its training; see ``api.extend``."""
    source = folder_of(run)
    before = source.load_config()
    if before.train.epochs is None:  # it is in a race
        raise no_checkpoint(source)

    def choose(config: Config, folder: RunFolder, ranks: Processes) -> Config:
        name = Checkpoints(source.checkpoints, ranks).order(checkpoint)[0]

        def write_store() -> None:
            base = TripleStore.open(source.store_of(before.data.path))
            base.check()
            origin = {"from": str(source.path.resolve())}
            folder.save_extension(origin)
            folder.save_extension({**origin, "checkpoint": name, **write(base, config)})

        on_first_rank(ranks, write_store)
        return config

    config = _config_of(before, RunFolder(output), epochs, freeze, overrides)
    return train_run(config, replace(extras, choose=choose, is_checked=True))


def _config_of(
    before: Config, folder: RunFolder, epochs: int | None, freeze: bool, overrides: Overrides
) -> Config:
    """Return the config of the old run, adapted to the new folder and its store."""
    if epochs is None:
        epochs = -(-before.train.epochs // 10)
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
    initial = [name for name, item in declared(Config).items() if key_of(item).resume is INITIAL]
    check_resume(config, changed, folder.path, allowed=initial)  # new rows need initial values
    check_effects(changed, Facts(extended=True), changed_keys(config, changed))
    return changed


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
