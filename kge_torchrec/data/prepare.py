"""From files of string triples to a `TripleStore`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from kge_torchrec.data import report as reports
from kge_torchrec.data.divide import check_ratio, divide
from kge_torchrec.data.encode import encode
from kge_torchrec.data.errors import DataError
from kge_torchrec.data.known import SIDES, build_side
from kge_torchrec.data.memory import InMemory, batches_of
from kge_torchrec.data.ordering import repeats
from kge_torchrec.data.readers import read_triples
from kge_torchrec.data.sources import SPLITS, WHOLE, Sources, find_sources
from kge_torchrec.data.store import TripleStore, check_writable, new_store, write_store

Batches = Iterable[tuple[str, pa.RecordBatch]]
LITERALS = ("drop", "keep")


def prepare(
    sources: Sources,
    output: str | Path,
    *,
    ratio: Sequence[float] = (0.9, 0.05, 0.05),
    seed: int = 0,
    has_header: bool | None = None,
    allow_unseen_relations: bool = False,
    literals: str = "drop",
    overwrite: bool = False,
    progress: bool = True,
) -> TripleStore:
    """Reads triples from files and writes a store to ``output``, whole or not at all.

    Args:
        sources: a directory with train, valid and test files, one file, or a list of files (see
            `find_sources` for the names and `read_triples` for the formats).
        output: the store's directory, replaced if it is a store and ``overwrite`` is set.
        ratio, seed: shares of train, valid and test, and the seed to draw them, where the files
            name no split; every entity and relation is kept in train.
        has_header: whether text files start with a header; None recognises one by its words.
        allow_unseen_relations: accept relations that have no training triple.
        literals: "drop" leaves out triples of N-Triples whose object is a literal (a name, a date,
            a number) and counts them; "keep" makes an entity of every literal.
        progress: show a progress bar, if standard error is a terminal.

    A triple repeated within a split is kept once. Entities without a training triple and triples
    shared by splits stay; the store's ``report`` counts them all: ``triples`` and ``duplicates``
    by split ("whole" for what was read undivided), ``unseen_entities`` and ``unseen_relations`` by
    split, ``literals`` dropped by split, ``shared`` by pair of splits ("train-test"), and where
    they came from: ``sources``, ``split`` (ratio and seed, or None).

    Raises:
        DataError: bad input, named by file and line.
        StoreError: ``output`` must not be written to.
    """
    check_ratio(ratio)
    if literals not in LITERALS:
        raise DataError(f"literals must be one of {', '.join(LITERALS)}, not {literals!r}")
    check_writable(Path(output), overwrite)
    files = find_sources(sources)
    notes = {"sources": {split: [str(path) for path in paths] for split, paths in files.items()}}
    if WHOLE in files:
        notes["split"] = {"ratio": list(ratio), "seed": seed}
    dropped = notes["literals"] = Counter()  # filled in while reading
    return _prepare(
        _read(files, has_header, dropped if literals == "drop" else None, progress),
        Path(output), ratio, seed, allow_unseen_relations, overwrite, progress, notes,
    )  # fmt: skip


def prepare_triples(
    splits: Mapping[str, InMemory],
    output: str | Path,
    *,
    allow_unseen_relations: bool = False,
    overwrite: bool = False,
) -> TripleStore:
    """Like `prepare` for triples in memory.

    Args:
        splits: "train" and optionally "valid" and "test", each a list of (head, relation, tail)
            strings, an array of strings (T, 3), or a pyarrow table of three string columns.

    Raises:
        DataError, StoreError: as `prepare`.
    """
    unknown = set(splits) - set(SPLITS)
    if unknown or "train" not in splits:
        raise DataError(f"splits {sorted(splits)}: give train, and optionally valid and test")
    batches = (
        (split, batch) for split in SPLITS for batch in batches_of(split, splits.get(split, ()))
    )
    return _prepare(
        batches, Path(output), (1, 0, 0), 0, allow_unseen_relations, overwrite, False, {}
    )


def _prepare(
    batches: Batches, output: Path, ratio, seed, allow_unseen_relations, overwrite, progress, notes
) -> TripleStore:
    with new_store(output, overwrite) as directory:
        entities, relations, triples = _encode(batches, notes)
        sizes = (len(entities), len(relations))
        with tqdm(total=6, desc="index", unit="table", disable=_hidden(progress)) as bar:
            triples, duplicates = _without_repeats(triples, sizes)
            if WHOLE in triples:
                triples = divide(triples.pop(WHOLE), ratio, seed, *sizes)
            unseen = reports.unseen_relations(relations, triples)
            if unseen and not allow_unseen_relations:
                raise _unseen_error(unseen)
            indices = {}
            for split in SPLITS:
                indices[split] = {}
                for side in SIDES:
                    indices[split][side] = build_side(side, triples[split], *sizes)
                    bar.update()
        report = {
            "triples": {split: len(triples[split]) for split in SPLITS},
            "duplicates": duplicates,
            "unseen_entities": reports.unseen_entities(entities, triples),
            "unseen_relations": unseen,
            "literals": {},
            "shared": {} if "split" in notes else reports.leaks(triples, indices, *sizes),
            "split": None,
            **notes,
        }
        write_store(directory, entities, relations, triples, indices, report)
    return TripleStore.open(output)


def _read(
    files: Mapping[str, list[Path]],
    has_header: bool | None,
    dropped: Counter[str] | None,
    progress: bool,
) -> Batches:
    """Batches with their split; counts the literals left out in ``dropped``, None keeps them."""
    total = sum(path.stat().st_size for paths in files.values() for path in paths)
    with tqdm(
        total=total, desc="read", unit="B", unit_scale=True, disable=_hidden(progress)
    ) as bar:
        for split in (*SPLITS, WHOLE):
            on_literals = None if dropped is None else partial(_count, dropped, split)
            for path in files.get(split, ()):
                for batch in read_triples(path, has_header, bar.update, on_literals):
                    yield split, batch


def _count(counter: Counter[str], key: str, number: int) -> None:
    counter[key] += number


def _hidden(progress: bool) -> bool | None:
    return None if progress else True  # None: tqdm looks whether there is a terminal


def _encode(batches: Batches, notes: Mapping) -> tuple[pa.Array, pa.Array, dict[str, np.ndarray]]:
    entities, relations, triples = encode(batches)
    if WHOLE not in triples:
        for split in SPLITS:
            triples.setdefault(split, np.empty((0, 3), np.int32))
    if not len(triples.get(WHOLE, triples.get("train"))):
        literals = sum(notes.get("literals", {}).values())
        if literals:
            raise DataError(
                f"no training triples: {literals:,} have a literal as object; take them with",
                literals="keep",
            )
        raise DataError("no training triples")
    return entities, relations, triples


def _without_repeats(
    triples: Mapping[str, np.ndarray], sizes: tuple[int, int]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Each split with every triple once, at its first place; and the numbers dropped."""
    kept, dropped = {}, {}
    for split, rows in triples.items():
        again = repeats(rows.T, (sizes[0], sizes[1], sizes[0]))
        kept[split] = np.delete(rows, again, axis=0) if len(again) else rows
        dropped[split] = len(again)
    return kept, dropped


def _unseen_error(unseen: Mapping[str, Mapping[str, int]]) -> DataError:
    cases = [
        f"{label!r} ({count} triples in {split})"
        for split, counts in unseen.items()
        for label, count in counts.items()
    ]
    more = f" and {len(cases) - 5} more" if len(cases) > 5 else ""
    return DataError(
        f"relations without a training triple: {', '.join(cases[:5])}{more}; nothing can be "
        "learnt for them. Correct the files, or keep them with",
        allow_unseen_relations=True,
    )
