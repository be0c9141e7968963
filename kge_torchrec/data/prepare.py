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
from kge_torchrec.data.numbering import NO_LABELS, Numbered, inverse, number
from kge_torchrec.data.readers.files import WHOLE, Sources
from kge_torchrec.data.readers.lists import read_features
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.reading import Source, open_sources
from kge_torchrec.data.report import notes as data_notes
from kge_torchrec.data.sort import chunks, copy_rows, drop_repeats, new_array
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
            `find_sources`); a data set by name, such as "pykeen:fb15k237" or "countries" (see
            `datasets`); or splits in memory, "train", "valid" and "test", or "whole", which is
            split.  In memory, triples are a list of (head, relation, tail) strings, an array of
            strings (T, 3), or a pyarrow table or data frame of such columns.  All but arrays may
            have the triple's weight as a fourth column, and its time as the last.
        output: The store's directory, replaced if it is a store and ``overwrite`` is set.
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
    if data.split != SplitOptions() and WHOLE not in source.names:
        raise DataError("data.split: these triples come in splits; leave it out")
    types = None if data.types is None else TypeSource(data.types, labels=source.labels)
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

    Args:
        base: The store that is extended.
        new: As ``sources`` of `prepare`.
        output: As for `prepare`.
        data: As for `prepare`; ``split`` and ``types`` do not act.  Entities that ``features`` does
            not have keep their features.
        progress: As for `prepare`.

    Raises:
        DataError, StoreError: As `prepare`, and where nothing is new.
    """
    data = data_config(data)
    source = open_sources(new, data, False, progress)
    types = None
    if base.report.get("types"):
        types = TypeSource(base.report["types"]["source"], base, source.is_described)
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
        listed = read_features(file, source.entities, source.labels, source.notes)
        return pc.unique(listed["entity"]).cast(pa.large_string())

    with new_store(output, overwrite) as folder:
        work = folder / "work"
        work.mkdir()
        # Read and number.
        known = (NO_LABELS,) * 2 if base is None else (base.entities.array, base.relations.array)
        others = None if data.features is None else entities_of_features
        graph = number(batches, work, known, others)
        notes = source.report()
        is_whole = base is None and WHOLE in graph.triples
        if not graph.triples or (base is None and not {"train", WHOLE} & graph.triples.keys()):
            literals = sum(notes["literals"].values())
            raise DataError(
                f"no training triples: {literals:,} have a literal as object; take them with "
                "data.literals keep"
                if literals
                else "no training triples; check the train file or data.split.ratio"
            )
        if data.weights == "loss" and not {"train", WHOLE} & graph.weights.keys():
            raise DataError(
                "the training triples have no weights: give each a fourth column, a positive number"
            )
        # Keep each triple once, behind those of the base.
        old: dict[str, int] = {}
        if base is not None:
            notes["extends"] = asdict(base.size)
            old = {split: len(base.split(split)) for split in SPLITS}
            graph = _behind(base, graph, work)
        sizes = len(graph.entities), len(graph.relations)
        graph, notes["duplicates"] = _without_repeats(graph, sizes, most, work, old)
        if base is not None and old == {split: len(rows) for split, rows in graph.triples.items()}:
            raise DataError(f"none of the triples is new: {base.path} has them all")
        # Find types, and order typed entities by them.
        if types is None and source.typed:
            types = TypeSource(PREFIX, is_described=source.is_described)
        order = None if types is None else types.find(graph.entities, graph.relations)
        if order is not None:
            _renumber(graph.triples, inverse(order))
            graph = graph._replace(entities=taken(graph.entities, order, work))
        # Split.
        split_of = None
        if is_whole:
            times = graph.times.get(WHOLE)
            split_of = split.apply(graph.triples[WHOLE], times, sizes, most, work)
            notes["split"] = split.report(times, split_of)
        _save_splits(graph, split_of, folder)
        entities, relations = graph.entities, graph.relations
        del graph  # its files are removed when nothing maps them
        shutil.rmtree(work)
        triples, _ = map_triples(folder)
        unseen = unseen_relations(relations, triples)
        if unseen and not data.allow_unseen_relations:
            raise _unseen_error(unseen)
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


def _behind(base: TripleStore, graph: Numbered, work: Path) -> Numbered:
    """Return triples and weights of every split: those of ``base``, then the new ones.

    New triples without a split are training triples.  Where either has weights, triples without one
    weigh 1.
    """
    triples, weights = {}, {}
    for split in SPLITS:
        new = WHOLE if split == "train" and WHOLE in graph.triples else split
        before, after = base.split(split), graph.triples.get(new, np.empty((0, 3), np.int32))
        triples[split] = _concatenated(before, after, work / f"joined-{split}.npy")
        own = base.weights(split), graph.weights.get(new)
        if own[0] is not None or own[1] is not None:
            first, second = (
                np.ones(len(rows), np.float32) if weight is None else weight
                for rows, weight in zip((before, after), own, strict=True)
            )
            weights[split] = _concatenated(first, second, work / f"joined-{split}-weight.npy")
    return graph._replace(triples=triples, weights=weights, times={})


def _concatenated(before: np.ndarray, after: np.ndarray, path: Path) -> np.ndarray:
    shape = len(before) + len(after), *before.shape[1:]
    joined = new_array(path, before.dtype, shape)
    joined[: len(before)] = before
    joined[len(before) :] = after
    return joined


def _without_repeats(
    graph: Numbered, sizes: tuple[int, int], most: int, work: Path, old: Mapping[str, int]
) -> tuple[Numbered, dict[str, int]]:
    """Return the graph with each triple of a split once, and the number of repeats by split.

    ``old`` says how many triples at the beginning of each split keep their weights.
    """
    kept = graph._replace(triples={}, weights={}, times={})
    duplicates = {}
    for split, rows in graph.triples.items():
        own = graph.weights.get(split), graph.times.get(split)
        is_repeat = drop_repeats(rows, sizes, most, work, *own, old=old.get(split, 0))
        for kind, array in (("triples", rows), ("weights", own[0]), ("times", own[1])):
            if array is not None:
                path = work / f"kept-{split}-{kind}.npy"
                getattr(kept, kind)[split] = copy_rows(array, path, is_repeat, False)
        duplicates[split] = len(rows) - len(kept.triples[split])
    if WHOLE not in duplicates:
        duplicates = {split: duplicates.get(split, 0) for split in SPLITS}
    return kept, duplicates


def _renumber(triples: Mapping[str, np.ndarray], ids: np.ndarray) -> None:
    """Change the entities of triples, in place, to their new ids (N,)."""
    for rows in triples.values():
        for part in chunks(rows):
            for column in (HEAD, TAIL):
                part[:, column] = ids[part[:, column]]


def _save_splits(graph: Numbered, split_of: np.ndarray | None, folder: Path) -> None:
    """Write triples and weights of each split, by ``split_of`` (T,) those of ``WHOLE``."""
    for place, split in enumerate(SPLITS):
        source = split if split_of is None else WHOLE
        rows = graph.triples.get(source, np.empty((0, 3), np.int32))
        of = np.full(len(rows), place, np.int8) if split_of is None else split_of
        copy_rows(rows, folder / f"{split}.npy", of, place)
        if source in graph.weights:
            copy_rows(graph.weights[source], folder / weights_name(split), of, place)


def _unseen_error(unseen: Mapping[str, Mapping[str, int]]) -> DataError:
    """Return the error for relations that only valid or test has, with their counts by split."""
    cases = [
        f"{label!r} ({count} triples in {split})"
        for split, counts in unseen.items()
        for label, count in counts.items()
    ]
    more = f" and {len(cases) - 5} more" if len(cases) > 5 else ""
    return DataError(
        f"relations without a training triple: {', '.join(cases[:5])}{more}; nothing can be "
        "learnt for them. Correct the files, or keep them with data.allow_unseen_relations true"
    )
