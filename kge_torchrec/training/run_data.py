"""The data of a run: a store that data.path names, or one that is prepared from files first.

Keys act or not depending on it, which a start checks first.
"""

from __future__ import annotations

import logging
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

from kge_torchrec.config import RESOLVED_KEYS, Config, all_keys
from kge_torchrec.config.keys import check_effects, replace_keys, without_effect
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import ALONE, Processes, on_all_ranks, on_first_rank
from kge_torchrec.training.run_folder import RunFolder

log = logging.getLogger(__name__)


def check_start(config: Config) -> None:
    """Raise ConfigError for a key that was set and has no effect.

    Keys that are null by default only cause a warning: a run's config.yaml has numbers for all.
    """
    check_effects(config, [key for key in all_keys() if key not in RESOLVED_KEYS])
    for reason in without_effect(config, RESOLVED_KEYS).values():
        log.warning("%s", reason)


def open_store(
    config: Config, path: Path, processes: Processes = ALONE, progress: bool = False
) -> TripleStore:
    """Open the store that data.path names, or prepare files into ``store`` of a folder first.

    Collective: rank 0 finds or prepares the store, and then all ranks map the same files.
    """
    data, folder = config.data, RunFolder(path)

    def find_or_prepare() -> Path:
        found = folder.find_store(data.path)
        if found is not None:
            return found
        if folder.has_checkpoint and os.sep in data.path and not Path(data.path).exists():
            return folder.store_of(data.path)  # raises
        from kge_torchrec.data.prepare import prepare  # imported late: a trained run needs none

        # `notes` of the store come with the results.
        prepare(data.path, folder.store, data, seed=config.seed, progress=progress, log_notes=False)
        return folder.store

    found = on_first_rank(processes, find_or_prepare)
    return on_all_ranks(processes, lambda: TripleStore.open(found))


def with_absolute_paths(config: Config) -> Config:
    """Return the config with absolute paths, so that a run opens from any folder."""

    def absolute(value: Any) -> Any:
        is_path = isinstance(value, str) and os.path.exists(value)
        return os.path.abspath(value) if is_path else value

    paths = (
        "data.path",
        "model.init_from",
        "evaluation.candidate_file",
    )
    return replace_keys(config, {key: absolute(attrgetter(key)(config)) for key in paths})
