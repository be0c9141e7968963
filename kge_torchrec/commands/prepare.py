"""``prepare`` and ``data check``: stores, and checks of a graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from kge_torchrec.commands import Settings, Table, Threads
from kge_torchrec.config.parser import data_config


def prepare(
    sources: Annotated[Sequence[str], "DIR_OR_FILE"],
    *,
    output: Annotated[str, "STORE"],
    settings: Settings = (),
    seed: int = 0,
    memory: Annotated[float | None, "GIB"] = None,
    overwrite: bool = False,
    progress: bool = True,
    threads: Threads = None,
) -> int:
    """Turn files of triples into a store for many runs.

    Keys of data say how triples are read and split, as --data.columns or only --columns.
    `kge-torchrec list keys data` says what they mean.

    Args:
        sources: a directory with train, valid and test files, files, or a description of edge files
            (YAML); a data set such as pykeen:fb15k237 or hf:ORGANIZATION/NAME; or countries (built
            in)
        output: folder of the new store, for --data.path
        memory: memory for the triples that are compared or sorted at a time (default: half of this
            machine's)
        overwrite: replace an existing store
        progress: show no progress bar
    """
    _limit_threads(threads)
    from kge_torchrec.data.prepare import prepare as write_store
    from kge_torchrec.data.report import notes

    store = write_store(
        sources[0] if len(sources) == 1 else sources,
        output,
        data_config(settings),
        seed=seed,
        memory=memory,
        overwrite=overwrite,
        progress=progress,
        log_notes=False,
    )
    print(store)
    for note in notes(store):
        print(f"note: {note}")
    return 0


def data(
    check: Literal["check"],
    data: Sequence[str],
    *,
    settings: Settings = (),
    seed: int = 0,
    format: Table = "table",
    threads: Threads = None,
) -> int:
    """Check a graph for leaks, repeats and unseen entities.

    Keys of data say how triples are read and split, as --data.columns or only --columns.
    `kge-torchrec list keys data` says what they mean.

    Args:
        check: what to do
        data: a store, or a source of triples like in prepare
    """
    _limit_threads(threads)
    from kge_torchrec.reports.data_check import check_data, text

    source = data[0] if len(data) == 1 else data
    results = check_data(source, data_config(settings), seed=seed)
    print(json.dumps(results) if format == "json" else text(results))
    return 0


def _limit_threads(threads: int | None) -> None:
    if threads is not None:
        import pyarrow

        pyarrow.set_cpu_count(threads)
