"""A check of a graph before training: sizes, repeats, leaks between splits and degrees.

Every figure is a sort or a count over arrays of ids. Hundreds of millions of triples take minutes
and a few times their own memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from kge_torchrec import files
from kge_torchrec.config import Config, DataConfig
from kge_torchrec.config.checks import check
from kge_torchrec.config.keys import Facts, check_effects
from kge_torchrec.config.parser import data_config
from kge_torchrec.data import SPLITS
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers.files import Sources
from kge_torchrec.data.report import (
    THRESHOLD,
    Overlap,
    PairIndex,
    find_overlaps,
    leaking,
    loops_of,
    reading_notes,
)
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
    counts_of = cardinalities(store)
    index = PairIndex(store.train, store.num_entities, store.num_relations)
    loops = loops_of(store.train, store.num_relations)
    overlaps = find_overlaps(index, counts_of["triples"], loops, threshold)
    names = store.relations.labels

    def named(overlap: Overlap) -> dict[str, Any]:
        first, second = names([overlap.first, overlap.second])
        return {**asdict(overlap), "first": first, "second": second}

    leaks = {}
    for split in ("valid", "test"):
        if len(triples := store.split(split)):
            counts = {k: int(v.sum()) for k, v in leaking(index, overlaps, triples).items()}
            shares = {f"{name}_share": count / len(triples) for name, count in counts.items()}
            leaks[split] = {**counts, **shares}
    place, report = categories(counts_of), store.report
    return {
        "entities": store.num_entities,
        "relations": store.num_relations,
        "triples": {split: len(store.split(split)) for split in SPLITS},
        "repeated": {
            "within": {k: n for k, n in report["duplicates"].items() if n},
            "across": report["shared"],
        },
        "unseen": {
            "entities": report["unseen_entities"],
            "relations": report["unseen_relations"],
        },
        "loops": int(loops.sum()),
        "threshold": threshold,
        "overlaps": {
            kind: [named(overlap) for overlap in getattr(overlaps, kind)]
            for kind in ("duplicates", "inverses", "symmetric")
        },
        "leaks": leaks,
        "categories": {
            name: {
                "relations": int((place == i).sum()),
                "triples": int(counts_of["triples"][place == i].sum()),
            }
            for i, name in enumerate(CATEGORIES)
        },
        "degrees": _degrees(store),
    }


def _degrees(store: TripleStore) -> dict[str, Any]:
    """Return statistics of the number of training triples that each entity is in."""
    degrees, entities = value_counts(chunks(store.degrees()))
    below = np.cumsum(entities)

    def quantile(share: float) -> int:
        return int(degrees[np.searchsorted(below, share * below[-1])])

    return {
        "mean": float((degrees * entities).sum() / below[-1]),
        "median": quantile(0.5),
        "p90": quantile(0.9),
        "p99": quantile(0.99),
        "max": int(degrees[-1]),
        "histogram": {"degrees": degrees.tolist(), "entities": entities.tolist()},
    }


def table(results: dict[str, Any]) -> str:
    """Return the results of ``check_data`` as text."""
    triples = results["triples"]
    lines = [
        f"{results['data']}: {results['entities']:,} entities, {results['relations']:,} relations; "
        + ", ".join(f"{split} {count:,}" for split, count in triples.items()),
        *(f"note: {note}" for note in results["notes"]),
        "",
        _line("triples repeated within a split", _counts(results["repeated"]["within"])),
        _line("triples in two splits", _counts(results["repeated"]["across"])),
        _line("loops (an entity with itself) in train", f"{results['loops']:,}"),
    ]
    for split in ("valid", "test"):
        unseen = results["unseen"]["entities"].get(split)
        text = f"{unseen['entities']:,} in {unseen['triples']:,} triples" if unseen else "none"
        lines.append(_line(f"entities of {split} not in train", text))
        relations = results["unseen"]["relations"].get(split)
        lines.append(_line(f"relations of {split} not in train", _counts(relations or {})))
    degrees = results["degrees"]
    lines.append(
        _line(
            "training triples per entity",
            "mean {mean:,.1f}, median {median:,}".format(**degrees),
        )
    )
    percentiles = "90% {p90:,}, 99% {p99:,}, most {max:,}".format(**degrees)
    lines.append(_line("training triples per entity, percentiles", percentiles))
    for name, category in results["categories"].items():
        many = f"{category['relations']:,} with {category['triples']:,} triples of train"
        lines.append(_line(f"relations {name}", many))
    lines += ["", *_leaks(results)]
    for kind in ("symmetric", "inverses", "duplicates"):
        lines += _relations(kind, results["overlaps"][kind], results["threshold"])
    return "\n".join(lines)


def _leaks(results: dict[str, Any]) -> list[str]:
    lines = [] if results["leaks"] else ["no valid or test triples to leak"]
    for split, leak in results["leaks"].items():
        for name, what in (
            ("redundant", "leaks by inverse, duplicate or symmetry"),
            ("linked", "entities linked in train, same direction"),
            ("linked_reversed", "entities linked in train, other direction"),
        ):
            lines.append(_line(f"{split}: {what}", f"{leak[name]:,} ({leak[f'{name}_share']:.1%})"))
    return lines


def _relations(kind: str, overlaps: list[dict[str, Any]], threshold: float) -> list[str]:
    lines = ["", f"{kind} (at least {threshold:g} of the triples of either): {len(overlaps):,}"]
    for overlap in overlaps[:MAX_LINES]:
        if kind == "symmetric":
            lines.append(f"  {overlap['first']}: {overlap['share_of_first']:.1%}")
        else:
            shares = f"{overlap['share_of_first']:.1%} / {overlap['share_of_second']:.1%}"
            lines.append(f"  {overlap['first']}  {overlap['second']}: {shares}")
    if len(overlaps) > MAX_LINES:
        lines.append(f"  and {len(overlaps) - MAX_LINES:,} more, in the JSON")
    return lines


def _line(what: str, value: str) -> str:
    return f"{what:<49} {value}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
