"""From the config's data.path to an open store."""

from __future__ import annotations

import shutil
from pathlib import Path

from kge_torchrec.config import DataConfig
from kge_torchrec.data.errors import DataError
from kge_torchrec.data.prepare import prepare, prepare_triples
from kge_torchrec.data.store import META, TripleStore
from kge_torchrec.parallel.processes import Processes, on_all_ranks, on_first_rank

EMBEDDED = "countries"


def open_store(
    config: DataConfig, seed: int, prepared: Path, processes: Processes, progress: bool
) -> TripleStore:
    """The store that data.path names; raw files are prepared into ``prepared`` first, once.

    Collective; rank 0 finds or prepares it, the others wait, then all map the same files.
    Raises DataError on bad input, OtherRankFailed where another rank cannot read the store.
    """

    def find_or_prepare() -> Path:
        # Rank 0 looks for all: one that looks later would find what rank 0 has just prepared.
        if (Path(config.path) / META).is_file():
            return Path(config.path)
        if not (prepared / META).is_file():
            _prepare(config, seed, prepared, progress)
        return prepared

    path = on_first_rank(processes, find_or_prepare)
    return on_all_ranks(processes, lambda: TripleStore.open(path))


def _prepare(config: DataConfig, seed: int, prepared: Path, progress: bool) -> None:
    if config.path == EMBEDDED and not Path(EMBEDDED).exists():
        from kge_torchrec.data.countries import country_splits

        prepare_triples(country_splits(), prepared)
        return
    try:
        prepare(
            config.path,
            prepared,
            ratio=config.ratio,
            seed=seed,
            has_header=config.has_header,
            allow_unseen_relations=config.allow_unseen_relations,
            literals=config.literals,
            progress=progress,
        )
    except DataError as error:
        error.spell(lambda name, value: f"--data.{name} {str(value).lower()}")  # as train's keys
        raise


def remove_prepared(prepared: Path) -> None:
    """Drops a store that was prepared for a run which then did not start."""
    shutil.rmtree(prepared, ignore_errors=True)
