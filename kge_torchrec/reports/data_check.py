"""A check of a graph before training: the report that `prepare` makes, and leaks between splits.

Leaks are joins over arrays of ids.  Hundreds of millions of triples take minutes and many times
their own memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from kge_torchrec.config import Config, DataConfig
from kge_torchrec.config.keys import check_effects
from kge_torchrec.config.parser import data_config
from kge_torchrec.data.leaks import find_leaks
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers.files import Sources
from kge_torchrec.data.report import leaking, notes
from kge_torchrec.data.store import META, TripleStore
from kge_torchrec.tables import table

MAX_LINES = 20  # overlaps in the text


def check_data(
    path: Sources, data: DataConfig | Mapping[str, Any] | None = None, *, seed: int = 0
) -> dict[str, Any]:
    """Return the report of a graph's store, with leaks between splits.

    Args:
        path: A prepared store, or an input of ``prepare``.
        data: How files are read and split, as for ``prepare``.
        seed: As for ``prepare``.

    Returns:
        The ``report`` of the store (see ``prepare``), "data", "entities", "relations", "notes",
        "overlaps" (relations that are duplicates, inverses or symmetric, see
        `data.leaks.find_leaks`), and the number of "leaks" of valid and test.

    Raises:
        DataError: The input cannot be used.
        ConfigError: A key of ``data`` has no effect on a store.
    """
    data = data_config(data)
    with ExitStack() as opened:
        if isinstance(path, str | Path) and (Path(path) / META).is_file():
            check_effects(Config(data=replace(data, path=str(path))))
            store = TripleStore.open(path)
        else:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            own = replace(data, allow_unseen_relations=True)  # which are counted here
            store = prepare(path, Path(folder) / "store", own, seed=seed, log_notes=False)
        overlaps, leaks = find_leaks(store)
        return {
            "data": str(path) if isinstance(path, str | Path) else ", ".join(map(str, path)),
            "entities": store.num_entities,
            "relations": store.num_relations,
            **store.report,
            "notes": notes(store),
            "overlaps": overlaps,
            "leaks": leaks,
        }


def text(results: dict[str, Any]) -> str:
    """Return the results of ``check_data`` for a terminal."""
    sizes, overlaps = results["triples"], results["overlaps"]
    lines = [
        f"{results['data']}: {results['entities']:,} entities, {results['relations']:,} relations; "
        + ", ".join(f"{split} {count:,}" for split, count in sizes.items()),
        *(f"note: {note}" for note in results["notes"]),
    ]
    if results["leaks"]:
        lines.append(leaking(results["leaks"], sizes))
    if overlaps:
        shares = dict.fromkeys(("share of first", "share of second"), ".1%")
        lines.append(table(overlaps[:MAX_LINES], shown=shares))
    if len(overlaps) > MAX_LINES:
        lines.append(f"and {len(overlaps) - MAX_LINES:,} more overlaps, with --format json")
    return "\n".join(lines)
