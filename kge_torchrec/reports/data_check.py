"""A check of a graph before training: what `prepare` reports, leaks between splits, and degrees.

Every figure is a join or a count over arrays of ids. Hundreds of millions of triples take minutes
and many times their own memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kge_torchrec import files
from kge_torchrec.config import Config, DataConfig
from kge_torchrec.config.checks import check
from kge_torchrec.config.keys import Facts, check_effects
from kge_torchrec.config.parser import data_config
from kge_torchrec.data.leaks import THRESHOLD, find_overlaps, leaking, loops_of
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers.files import Sources
from kge_torchrec.data.report import reading_notes
from kge_torchrec.data.sort import chunks, value_counts
from kge_torchrec.data.store import META, TripleStore
from kge_torchrec.ranking.groups import CATEGORIES, cardinalities, categories

MAX_LINES = 10  # relations per table


def check_data(
    path: Sources,
    output: str | Path | None = None,
    threshold: float = THRESHOLD,
    data: DataConfig | Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Return sizes, repeats, leaks between splits and degrees of a graph of triples.

    Args:
        path: A prepared store, or an input of ``prepare``: a folder, a file, several files or the
            name of a dataset.
        output: A folder for ``data-check.json``. None writes nothing.
        threshold: Two relations are duplicates or inverses if they share at least this share of
            the triples of either.
        data: How files are read and split, as for ``prepare``.
        seed: As for ``prepare``.

    Returns:
        "notes" (such as how first lines were read), "entities", "relations", "triples" by split,
        "repeated" triples by split and by pair of splits, "unseen" entities and relations,
        "loops", "overlaps" (relations that are duplicates, inverses or symmetric), "leaks" of valid
        and test, "categories" of relations, and "degrees".

    Raises:
        DataError: The input cannot be used.
        ConfigError: ``threshold`` is outside (0, 1], or a key of ``data`` has no effect on a store.
    """
    check(0 < threshold <= 1, "threshold", "in (0, 1]", threshold)
    with _opened(path, data_config(data), seed) as store:
        results = {
            "data": str(path) if isinstance(path, str | Path) else ", ".join(map(str, path)),
            "notes": reading_notes(store),
            **_check(store, threshold),
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


def _check(store: TripleStore, threshold: float) -> dict[str, Any]:
    counts_of, report = cardinalities(store), store.report
    loops = loops_of(store.train, store.num_relations)
    found = find_overlaps(store.train, counts_of["triples"], loops, threshold)
    names = store.relations.array
    leaks: dict[str, dict[str, float]] = {}
    for split in ("valid", "test"):
        if len(triples := store.split(split)):
            marked = leaking(store.train, found, triples)
            counts = {name: int(which.sum()) for name, which in marked.items()}
            shares = {f"{name}_share": count / len(triples) for name, count in counts.items()}
            leaks[split] = {**counts, **shares}
    place = categories(counts_of)
    degrees, entities = value_counts(chunks(store.degrees()))
    below = np.cumsum(entities)
    quantiles = {
        name: int(degrees[np.searchsorted(below, share * below[-1])])
        for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1))
    }
    return {
        "entities": store.num_entities,
        "relations": store.num_relations,
        "triples": report["triples"],
        "repeated": {
            "within": {split: count for split, count in report["duplicates"].items() if count},
            "across": report["shared"],
        },
        "unseen": {kind: report[f"unseen_{kind}"] for kind in ("entities", "relations")},
        "loops": int(loops.sum()),
        "threshold": threshold,
        "overlaps": {
            kind: [
                {**one._asdict(), **{at: names[getattr(one, at)].as_py() for at in one._fields[:2]}}
                for one in own
            ]
            for kind, own in found.items()
        },
        "leaks": leaks,
        "categories": {
            name: {
                "relations": int((place == i).sum()),
                "triples": int(counts_of["triples"][place == i].sum()),
            }
            for i, name in enumerate(CATEGORIES)
        },
        "degrees": {
            "mean": float((degrees * entities).sum() / below[-1]),
            **quantiles,
            "histogram": {"degrees": degrees.tolist(), "entities": entities.tolist()},
        },
    }


def table(results: dict[str, Any]) -> str:
    """Return the results of ``check_data`` as text."""
    triples, degrees, repeated = results["triples"], results["degrees"], results["repeated"]
    rows: list[tuple[str, str]] = [
        ("triples repeated within a split", _counts(repeated["within"])),
        ("triples in two splits", _counts(repeated["across"])),
        ("loops (an entity with itself) in train", f"{results['loops']:,}"),
    ]
    for split in ("valid", "test"):
        unseen = results["unseen"]["entities"].get(split)
        text = f"{unseen['entities']:,} in {unseen['triples']:,} triples" if unseen else "none"
        rows.append((f"entities of {split} not in train", text))
        relations = results["unseen"]["relations"].get(split, {})
        rows.append((f"relations of {split} not in train", _counts(relations)))
    numbers = "mean {mean:,.1f}, median {median:,}, 90% {p90:,}, 99% {p99:,}, most {max:,}"
    rows.append(("training triples per entity", numbers.format(**degrees)))
    for name, own in results["categories"].items():
        text = f"{own['relations']:,} with {own['triples']:,} triples of train"
        rows.append((f"relations {name}", text))
    for split, leak in results["leaks"].items():
        for name, what in (
            ("redundant", "leaks by inverse, duplicate or symmetry"),
            ("linked", "entities linked in train, same direction"),
            ("linked_reversed", "entities linked in train, other direction"),
        ):
            rows.append((f"{split}: {what}", f"{leak[name]:,} ({leak[f'{name}_share']:.1%})"))
    lines = [
        f"{results['data']}: {results['entities']:,} entities, {results['relations']:,} relations; "
        + ", ".join(f"{split} {count:,}" for split, count in triples.items()),
        *(f"note: {note}" for note in results["notes"]),
        *(f"{what:<49} {value}" for what, value in rows),
    ]
    for kind, overlaps in results["overlaps"].items():
        share = f"at least {results['threshold']:g} of the triples of either"
        lines.append(f"{kind} ({share}): {len(overlaps):,}")
        for one in overlaps[:MAX_LINES]:
            shares = f"{one['share_of_first']:.1%} / {one['share_of_second']:.1%}"
            lines.append(f"  {one['first']}  {one['second']}: {shares}")
        if len(overlaps) > MAX_LINES:
            lines.append(f"  and {len(overlaps) - MAX_LINES:,} more, in the JSON")
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
