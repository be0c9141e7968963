"""Prepare a `TripleStore` from triples of strings, in files or in memory.

Labels become ids (`numbering`), repeated triples are dropped, and triples without a split are split
(`split.Split`).  Arrays of all triples are files, which are read and written in pieces.

Shapes: T triples, N entities.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.config.data import DataConfig, SplitOptions
from kge_torchrec.config.parser import data_config
from kge_torchrec.data import FEATURES, HEAD, SPLITS, TAIL
from kge_torchrec.data.features import features_from
from kge_torchrec.data.labels import taken
from kge_torchrec.data.numbering import NO_ROWS, Rows, inverse, number
from kge_torchrec.data.readers.files import WHOLE, Sources
from kge_torchrec.data.readers.lists import read_pairs
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.reading import Source, open_sources
from kge_torchrec.data.report import notes as data_notes
from kge_torchrec.data.sort import chunks, copy_rows, drop_repeats
from kge_torchrec.data.split import Split
from kge_torchrec.data.store import TripleStore, weights_name
from kge_torchrec.data.store.contents import (
    finish_store,
    map_triples,
    unseen_relations,
    used_entities,
)
from kge_torchrec.data.store.writing import check_writable, new_store
from kge_torchrec.data.type_sources import PREFIX, TypeSource
from kge_torchrec.environment import host_memory
from kge_torchrec.errors import DataError

log = logging.getLogger(__name__)

GIB = 1 << 30
LEAST = 2.0  # GiB: the program, pyarrow's reader and a few batches take one
OTHERS = 1.25  # GiB beside the arrays whose size follows from the bound
PER_ROW = 72  # bytes of a row while rows are compared or sorted


def prepare(
    sources: Sources | Mapping[str, InMemory],
    output: str | Path,
    data: DataConfig | Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    memory: float | None = None,
    overwrite: bool = False,
    progress: bool = True,
    log_notes: bool = True,
) -> TripleStore:
    """Read triples and write a store to ``output``, whole or not at all.

    A triple that is repeated within a split is kept once, with the largest of its weights; in a
    split by time, with its earliest time and the weight that it had then.  Times are not stored.
    Entities without a training triple, and triples that splits share, stay.  The store's ``report``
    counts them all: ``triples`` and ``duplicates`` by split ("whole" for triples without a split),
    ``unseen_entities`` and ``unseen_relations`` by split, ``literals`` dropped by split, min, mean
    and max of ``weights`` by split, ``shared`` by pair of splits ("train-test"); also ``sources``,
    ``reading`` (what was noticed in them), ``split`` (see `Split.report`, or None) and ``types``.

    Args:
        sources: A directory with train, valid and test files, a file, or a list of files (see
            `find_sources`); a data set by name (see `datasets`); or splits in memory, "train",
            "valid" and "test", or "whole", which is split.  In memory, triples are a list of (head,
            relation, tail) strings, an array of strings (T, 3), or a pyarrow table or data frame of
            such columns.  All but arrays may have the triple's weight as a fourth column, and its
            time as the last.
        output: The store's directory.
        data: Keys of the section ``data`` of a config, such as {"split.by": "last"}; nested values
            work as well.  Options that do not act on these sources are ignored.
        seed: Seed of the split.
        memory: GiB of memory, at least 2; None: half of this machine's.  It bounds how many triples
            are compared or sorted at a time; other triples are in files.
        overwrite: Replace a store at ``output``.
        progress: Show a progress bar if standard error is a terminal.
        log_notes: Log what to know about the data (`report.notes`) as warnings.

    Raises:
        DataError: Bad input, named by file and line.
        ConfigError: A key of ``data`` is unknown or out of range.
        StoreError: ``output`` must not be written to.
    """
    data = data_config(data)
    if seed < 0:
        raise DataError(f"seed must be an integer >= 0, got {seed}")
    split = Split(data.split, seed)
    check_writable(Path(output), overwrite)
    source = open_sources(sources, data, split.times, progress)
    if source.is_described and data.types is not None:
        raise DataError(f"{sources} describes a typed graph: leave out data.types")
    if data.split != SplitOptions() and WHOLE not in source.splits:
        raise DataError("data.split: these triples come in splits; leave it out")
    types = None if data.types is None else TypeSource(data.types, source)
    store = _write(source, types, split, data, Path(output), memory=memory, overwrite=overwrite)
    for note in data_notes(store) if log_notes else ():
        log.warning(note)
    return store


def extend_store(
    base: TripleStore,
    new: Sources | Mapping[str, InMemory],
    output: str | Path,
    data: DataConfig | Mapping[str, Any] | None = None,
    *,
    progress: bool = True,
) -> TripleStore:
    """Write a store of the triples of ``base`` and new ones, whole or not at all.

    Labels of ``base`` keep their ids and new labels follow; the same holds for the triples of every
    split.  Triples without a split are training triples.  Triples that ``base`` has in the same
    split are dropped and counted, and keep their weights.  Where either has weights, triples
    without one weigh 1.  If ``base`` has the types of a relation, new triples of it give types as
    well.  The report's ``extends`` has the counts of ``base``, at which the new part begins:
    ``entities``, ``relations``, ``triples`` (train), ``valid`` and ``features``.

    ``new``, ``output`` and ``data`` are as for `prepare`, but ``split`` and ``types`` do not act,
    and entities that ``features`` does not have keep their features.

    Raises:
        DataError, StoreError: As `prepare`, and where nothing is new.
    """
    data = data_config(data)
    source = open_sources(new, data, False, progress)
    types = None
    if base.report.get("types"):
        types = TypeSource(base.report["types"]["source"], source, base)
    if source.is_described and not base.size.typed:
        raise DataError(f"{new}: {base.path} has no types of nodes, so edges cannot have any")
    # Training of the new run logs the notes.
    split, own = Split(SplitOptions()), replace(data, weights="ignore")
    return _write(source, types, split, own, Path(output), base=base)


def rows_within(memory: float | None) -> int:
    """Return how many rows are compared or sorted at a time within some GiB of memory.

    Raises:
        DataError: The bound is too small.
    """
    if memory is None:
        memory = max(LEAST, host_memory() / GIB / 2)
    if not memory >= LEAST:
        raise DataError(f"memory must be at least {LEAST:g} GiB, got {memory:g}")
    return int((memory - OTHERS) * GIB) // PER_ROW


def _write(
    source: Source,
    types: TypeSource | None,
    split: Split,
    data: DataConfig,
    output: Path,
    *,
    base: TripleStore | None = None,
    memory: float | None = None,
    overwrite: bool = False,
) -> TripleStore:
    """Write the store of a source; labels and triples of ``base`` come first."""
    most = rows_within(memory)
    batches = source.batches()
    if types is not None:
        batches = types.passing(batches)
    listed: pa.Table | None = None  # the rows of the file of features
    file = Path(data.features or "")

    def entities_of_features() -> pa.Array:
        """Read the file of features; what its ids mean is known once the triples are read."""
        nonlocal listed
        listed = read_pairs(file, "feature", source.entities, source.labels, source.notes)
        return pc.unique(listed["entity"]).cast(pa.large_string())

    with new_store(output, overwrite) as folder:
        work = folder / "work"
        work.mkdir()
        # Read and number.
        others = None if data.features is None else entities_of_features
        if base is not None:
            batches = (("train" if split == WHOLE else split, rows) for split, rows in batches)
        entities, relations, splits = number(batches, work, base, others)
        notes = source.report()
        first = splits.get("train", splits.get(WHOLE))
        if first is None:
            remedy = "check the train file or data.split.ratio"
            if literals := sum(notes["literals"].values()):
                remedy = f"{literals:,} have a literal as object; take them with data.literals keep"
            raise DataError(f"no training triples: {remedy}")
        if data.weights == "loss" and first.weights is None:
            raise DataError(
                "the training triples have no weights: give each a fourth column, a positive number"
            )
        # Keep each triple once.
        old: dict[str, int] = {}
        if base is not None:
            notes["extends"] = asdict(base.size)
            old = {split: len(base.split(split)) for split in SPLITS}
        sizes = len(entities), len(relations)
        is_whole = WHOLE in splits
        splits, notes["duplicates"] = _without_repeats(splits, sizes, most, work, old)
        if base is not None and old == {name: len(x.triples) for name, x in splits.items()}:
            raise DataError(f"none of the triples is new: {base.path} has them all")
        # Find types, and order typed entities by them.
        if types is None and source.typed:
            types = TypeSource(PREFIX, source)
        order = None if types is None else types.find(entities, relations)
        if order is not None:
            _renumber(splits, inverse(order))
            entities = taken(entities, order, work)
        notes["split"] = _save(splits, split, sizes, most, work, folder)
        del splits, first  # their files are removed when nothing maps them
        shutil.rmtree(work)
        triples, _ = map_triples(folder)
        if not data.allow_unseen_relations:
            _refuse(unseen_relations(relations, triples))
        # Types and features.
        table = None
        if types is not None:
            notes["types"] = types.report(entities, relations, triples, is_whole)
            table = types.types
            if listed is not None and types.typed and FEATURES in table.names.to_pylist():
                raise DataError(
                    f"{file}: entities.tables.{FEATURES} has the settings of features, so "
                    f"no node type can have the name {FEATURES!r}; rename the type"
                )
        features = None if base is None else base.features()
        if base is not None and features is not None:
            notes["features"] = base.report["features"]
        if listed is not None:
            in_graph = used_entities(triples, len(entities))
            in_graph[: 0 if base is None else base.num_entities] = True
            features = features_from(listed, file, entities, in_graph, features)
            notes["features"] = {"source": str(file)}
        if features is not None:
            features = features.longer(len(entities))
        finish_store(folder, entities, relations, notes, table, features, most)
    return TripleStore.open(output)


def _without_repeats(
    splits: Mapping[str, Rows],
    sizes: tuple[int, int],
    most: int,
    work: Path,
    old: Mapping[str, int],
) -> tuple[dict[str, Rows], dict[str, int]]:
    """Return each triple of a split once, and the number of repeats by split.

    ``old`` says how many triples at the beginning of each split keep their weights.
    """
    folder, kept = work / "kept", {}
    folder.mkdir()
    repeats = dict.fromkeys(() if WHOLE in splits else SPLITS, 0)
    for name, rows in splits.items():
        is_repeat = drop_repeats(rows.triples, sizes, most, work, *rows[1:], old=old.get(name, 0))
        kept[name] = _kept(rows, is_repeat, False, folder, name)
        repeats[name] = len(rows.triples) - len(kept[name].triples)
    return kept, repeats


def _renumber(splits: Mapping[str, Rows], ids: np.ndarray) -> None:
    """Change the entities of triples, in place, to their new ids (N,)."""
    for rows in splits.values():
        for part in chunks(rows.triples):
            part[:, [HEAD, TAIL]] = ids[part[:, [HEAD, TAIL]]]


def _save(
    splits: Mapping[str, Rows],
    split: Split,
    sizes: tuple[int, int],
    most: int,
    work: Path,
    folder: Path,
) -> dict[str, Any] | None:
    """Write the rows of each split; split those of ``WHOLE``, and return the report of that."""
    if WHOLE not in splits:
        for name in SPLITS:
            rows = splits.get(name, NO_ROWS)
            _kept(rows, np.zeros(len(rows.triples), np.int8), 0, folder, name)
        return None
    rows = splits[WHOLE]
    split_of = split.apply(rows.triples, rows.times, sizes, most, work)
    for place, name in enumerate(SPLITS):
        _kept(rows._replace(times=None), split_of, place, folder, name)
    return split.report(rows.times, split_of)


def _kept(rows: Rows, of: np.ndarray, value: int, folder: Path, name: str) -> Rows:
    """Return the rows where ``of`` (T,) has a value, in files that are named as in a store."""
    files = f"{name}.npy", weights_name(name), f"times-{name}.npy"
    kept = {
        field: copy_rows(values, folder / file, of, value)
        for (field, values), file in zip(rows._asdict().items(), files, strict=True)
        if values is not None
    }
    return Rows(**kept)


def _refuse(unseen: Mapping[str, Mapping[str, int]]) -> None:
    """Raise DataError for relations that only valid or test has, with their counts by split."""
    cases = [
        f"{label!r} ({count} triples in {split})"
        for split, counts in unseen.items()
        for label, count in counts.items()
    ]
    if cases:
        more = f" and {len(cases) - 5} more" if len(cases) > 5 else ""
        raise DataError(
            f"relations without a training triple: {', '.join(cases[:5])}{more}; nothing can be "
            "learnt for them. Correct the files, or keep them with data.allow_unseen_relations true"
        )
