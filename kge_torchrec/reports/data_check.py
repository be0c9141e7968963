"""A check of a graph before training: the report that `prepare` makes, and leaks between splits.

Leaks are joins over arrays of ids.  Hundreds of millions of triples take minutes and many times
their own memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kge_torchrec import files
from kge_torchrec.config import Config, DataConfig
from kge_torchrec.config.checks import check
from kge_torchrec.config.keys import Facts, check_effects
from kge_torchrec.config.parser import data_config
from kge_torchrec.data.leaks import THRESHOLD, find_leaks
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers.files import Sources
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import META, TripleStore
from kge_torchrec.tables import Cell, aligned, table

MAX_LINES = 10  # relations of a kind in the text
LEAKS = {
    "redundant": "by inverse, duplicate or symmetry",
    "linked": "entities linked in train, same direction",
    "linked_reversed": "entities linked in train, other direction",
}


def check_data(
    path: Sources,
    output: str | Path | None = None,
    threshold: float = THRESHOLD,
    data: DataConfig | Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the report of a graph's store, with leaks between splits.

    Args:
        path: A prepared store, or an input of ``prepare``.
        output: A folder for ``data-check.json``. None writes nothing.
        threshold: Two relations are duplicates or inverses if they share at least this share of
            the triples of either.
        data: How files are read and split, as for ``prepare``.
        seed: As for ``prepare``.

    Returns:
        The ``report`` of the store (see ``prepare``), "data", "entities", "relations", "notes",
        "overlaps" (relations that are duplicates, inverses or symmetric), and the number and share
        of "leaks" of valid and test.

    Raises:
        DataError: The input cannot be used.
        ConfigError: ``threshold`` is outside (0, 1], or a key of ``data`` has no effect on a store.
    """
    check(0 < threshold <= 1, "threshold", "in (0, 1]", threshold)
    with _opened(path, data_config(data), seed) as store:
        overlaps, leaks = find_leaks(store, threshold)
        sizes = store.report["triples"]
        results = {
            "data": str(path) if isinstance(path, str | Path) else ", ".join(map(str, path)),
            "entities": store.num_entities,
            "relations": store.num_relations,
            **store.report,
            "notes": notes(store),
            "threshold": threshold,
            "overlaps": overlaps,
            "leaks": {
                split: own | {f"{kind}_share": n / sizes[split] for kind, n in own.items()}
                for split, own in leaks.items()
            },
        }
    if output is not None:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / "data-check.json", results)
    return results


@contextmanager
def _opened(path: Sources, data: DataConfig, seed: int) -> Iterator[TripleStore]:
    """Yield the store at a path, or a temporary store made from the files at the path."""
    if isinstance(path, str | Path) and (Path(path) / META).is_file():
        check_effects(Config(data=data), Facts(is_store=True))
        yield TripleStore.open(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        # Unseen relations are counted here.
        data = replace(data, allow_unseen_relations=True)
        yield prepare(path, Path(folder) / "store", data, seed=seed, log_notes=False)


def text(results: dict[str, Any]) -> str:
    """Return the results of ``check_data`` for a terminal."""
    lines = [
        f"{results['data']}: {results['entities']:,} entities, {results['relations']:,} relations; "
        + ", ".join(f"{split} {count:,}" for split, count in results["triples"].items()),
        *(f"note: {note}" for note in results["notes"]),
    ]
    leaks: list[dict[str, Cell]] = [
        {"split": split, "leak": what, "triples": own[kind], "share": own[f"{kind}_share"]}
        for split, own in results["leaks"].items()
        for kind, what in LEAKS.items()
    ]
    if leaks:
        lines.append(table(leaks, shown={"share": ".1%"}))
    for kind, overlaps in results["overlaps"].items():
        share = f"at least {results['threshold']:g} of the triples of either"
        lines.append(f"{kind} ({share}): {len(overlaps):,}")
        pairs = [
            [f"  {x['first']}", x["second"], f"{x['share_of_first']:.1%}",
             f"{x['share_of_second']:.1%}"] for x in overlaps[:MAX_LINES]
        ]  # fmt: skip
        lines += aligned(pairs, [False, False, True, True])
        if len(overlaps) > MAX_LINES:
            lines.append(f"  and {len(overlaps) - MAX_LINES:,} more, in the JSON")
    return "\n".join(lines)
