"""Prepare a `TripleStore` from triples of strings, in files or in memory.

Labels become ids (`labels.encode`), repeated triples are dropped, and triples without a split are
split (`split.Split`).  Memory is bounded, except for the ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from kge_torchrec.config.data import DataConfig, SplitOptions
from kge_torchrec.config.parser import data_config
from kge_torchrec.data import SPLITS
from kge_torchrec.data.labels import Encoded, check_labels, encode
from kge_torchrec.data.large import Estimate, bound, is_large, key_of
from kge_torchrec.data.readers.files import WHOLE, Sources
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.reading import Batches, Source, hidden, open_sources
from kge_torchrec.data.report import notes as data_notes
from kge_torchrec.data.sort import drop_repeats
from kge_torchrec.data.split import Split, joined_times
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.contents import content_report, leaks, unseen_relations
from kge_torchrec.data.store.filter_index import build_indices
from kge_torchrec.data.store.writing import StoreContents, check_writable, new_store, write_store
from kge_torchrec.data.target import Target, check_triples, check_weights, unseen_error
from kge_torchrec.errors import DataError

if TYPE_CHECKING:
    from kge_torchrec.data.node_types import NodeTypes
    from kge_torchrec.data.store.entity_types import TypeTriples

log = logging.getLogger(__name__)


def prepare(
    sources: Sources | Mapping[str, InMemory],
    output: str | Path,
    data: DataConfig | Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    spread: int = 1,
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
    their ``first_lines``, ``split`` (see `Split.report`, or None) and ``types`` (relation, and
    counts).

    Args:
        sources: A directory with train, valid and test files, one file, or a list of files (see
            `find_sources` for the names and `read_triples` for the formats); or a data set of a
            library by name, such as "pykeen:fb15k237" (see `datasets`); or "countries", the graph
            inside the package, unless a file has that name; or splits in memory: "train" and
            optionally "valid" and "test", each a list of (head, relation, tail) strings, an array
            of strings (T, 3), or a pyarrow table or data frame of three string columns, in this
            order unless they have these names.  All but arrays may have the triple's weight as a
            fourth, and its time as the last.  {"whole": triples} are split.
        output: The store's directory, replaced if it is a store and ``overwrite`` is set.
        data: How they are read and split: keys of the section ``data`` of a config, such as
            {"split.by": "last", "types": "prefix"}; nested values work as well.  Options that do
            not act on these sources are ignored.
        seed: Seed of the split.
        spread: Number of equal parts of the ids, each with an equal share of every node type.  As
            many ranks, or a divisor of it, then answer equally many lookups.
        memory: GiB of memory, at least 2; None: half of this machine's.  Files that would take more
            are prepared on disk, in a folder beside ``output``, from which a later call resumes.
            Splits at random and by files can be; splits by head, time and last, types and features
            take memory for all triples.
        overwrite: Replace a store at ``output``.
        progress: Show a progress bar if standard error is a terminal.
        log_notes: Log what to know about the data (`report.notes`) as warnings: how first lines
            were read, repeated triples, sizes that say little, ...

    Raises:
        DataError: Bad input, named by file and line.
        ConfigError: A key of ``data`` is unknown or out of range.
        StoreError: ``output`` must not be written to.
    """
    data = data_config(data)
    if seed < 0:
        raise DataError(f"seed must be an integer >= 0, got {seed}")
    split = Split(**asdict(data.splitting), seed=seed)
    check_writable(Path(output), overwrite)
    from kge_torchrec.data.node_types import PREFIX, NodeTypes
    from kge_torchrec.data.store.entity_types import TypeTriples

    if spread < 1:
        raise DataError(f"spread must be an integer >= 1, got {spread}")
    source = open_sources(sources, data, split.times, progress)
    if source.ends is not None and (data.types is not None or data.types_from is not None):
        raise DataError(f"{sources} describes a typed graph: leave out data.types")
    if data.splitting != SplitOptions() and WHOLE not in source.names:
        raise DataError("data.split: these triples come in splits; leave it out")
    types, features = data.types, data.features
    target = Target(
        Path(output), progress, data.allow_unseen_relations, overwrite, log_notes, split,
        needs_weights=data.weights == "loss", features=features, spread=spread,
    )  # fmt: skip
    kinds: TypeTriples | NodeTypes | None = None
    held = {"types": types or source.ends or spread > 1, "types_from": data.types_from,
            "features": features, f"split.by {split.by}": split.by != "random"}  # fmt: skip
    files = source.files
    if files is not None and is_large(files, memory, [name for name in held if held[name]]):
        from kge_torchrec.data.large.on_disk import OnDisk

        key = key_of(files, {"data": asdict(data), "seed": seed})
        OnDisk(target, key, Estimate.of(files), bound(memory)).prepare(source)
        return _opened(target)
    if data.types_from is not None:
        kinds = TypeTriples(data.types_from, data.type_triples)
    elif types is not None or source.ends is not None:
        kinds = NodeTypes(types or PREFIX, declared=source.ends, spread=spread)
    return _prepare(source, {}, target, kinds)


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
    without one weigh 1.  If ``base`` was prepared with ``types_from``, new triples of that relation
    give types as well.  The report's ``extends`` has the counts of ``base``, at which the new part
    begins: ``entities``, ``relations``, ``triples`` (train), ``valid`` and ``features``.

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
    from kge_torchrec.data.node_types import NodeTypes
    from kge_torchrec.data.store.entity_types import TypeTriples

    data = data_config(data)
    source = open_sources(new, data, False, progress)
    notes = {"extends": asdict(base.size)}
    # Training of the new run logs the notes.
    target = Target(Path(output), progress, data.allow_unseen_relations, features=data.features)
    types = TypeTriples.of_extended(base) or NodeTypes.of_extended(base, source.ends or {})
    if source.ends and not isinstance(types, NodeTypes):
        raise DataError(f"{new}: {base.path} has no types of nodes, so edges cannot have any")
    return _prepare(source, notes, target, types, base)


def _prepare(
    source: Source,
    notes: Mapping[str, Any],
    target: Target,
    type_triples: TypeTriples | NodeTypes | None = None,
    base: TripleStore | None = None,
) -> TripleStore:
    """Write the store of a source; labels and triples of ``base`` come first."""
    from kge_torchrec.data.features import FeatureFile, FeatureTable
    from kge_torchrec.data.node_types import PREFIX, NodeTypes
    from kge_torchrec.data.store.entity_types import TypeTriples

    batches = source.batches()
    if isinstance(type_triples, TypeTriples):
        batches = type_triples.passing(batches)
    with new_store(target.output, target.overwrite) as directory:
        entities, relations, triples, blocks, time_blocks = _encode(batches, base)
        notes = {**source.report(), **notes}
        if base is None or not any(map(len, triples.values())):
            check_triples({split: len(rows) for split, rows in triples.items()}, notes)
        if type_triples is None and source.typed:
            type_triples = NodeTypes(PREFIX, spread=target.spread)
        if target.spread > 1 and not isinstance(type_triples, NodeTypes):
            raise DataError("spread: these triples have no node types; give data.types prefix")
        weights = _joined(blocks, triples, target.needs_weights)
        times = {WHOLE: joined_times(time_blocks.pop(WHOLE))} if target.split.times else {}
        bag = None if target.features is None else FeatureFile(target.features, source)
        if bag is not None:
            entities = bag.with_entities(entities)
        sizes = (len(entities), len(relations))
        with tqdm(total=6, desc="index", unit="table", disable=hidden(target.progress)) as bar:
            old = {} if base is None else {split: len(base.split(split)) for split in SPLITS}
            if base is not None:
                triples, weights = _after(base, triples, weights)
            duplicates = drop_repeats(triples, weights, sizes, times, old)
            if base is not None and old == {split: len(rows) for split, rows in triples.items()}:
                raise DataError(f"none of the triples is new: {base.path} has them all")
            if isinstance(type_triples, NodeTypes):
                entities, triples = type_triples.contiguous(entities, triples)
            if WHOLE in triples:
                parts = triples[WHOLE], weights.get(WHOLE), times.pop(WHOLE, None)
                triples, weights, done = target.split.apply(*parts, entities, relations)
                notes = {**notes, "split": done}
                del parts
            unseen = unseen_relations(relations, triples)
            if unseen and not target.allow_unseen_relations:
                raise unseen_error(unseen)
            indices = build_indices(triples, *sizes, on_built=bar.update)
        types = None
        if type_triples is not None:
            table, counts = type_triples.table(entities, relations, triples)
            if bag is not None and "ends" in counts:
                bag.check_types(table.names)
            types, notes = (table.names, table.indptr, table.types), {**notes, "types": counts}
        features = FeatureTable.of(base)
        origin = {} if base is None else base.report.get("features", {})
        if bag is not None:
            features, origin = bag.table(entities, features), {"source": str(bag.path)}
        if features is not None:
            features = features.longer(len(entities))
            notes = {**notes, "features": {**origin, **features.counts(entities, triples)}}
        report = {
            **content_report(entities, relations, triples, weights),
            "duplicates": duplicates,
            "shared": {} if "split" in notes else leaks(triples, indices, *sizes),
            **notes,
        }
        whole = StoreContents(entities, relations, triples, indices, weights, types, features)
        write_store(directory, whole, report)
    return _opened(target)


def _opened(target: Target) -> TripleStore:
    store = TripleStore.open(target.output)
    for note in data_notes(store) if target.log_notes else ():
        log.warning(note)
    return store


def _after(
    base: TripleStore, triples: dict[str, np.ndarray], weights: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return triples and weights of every split: those of ``base``, then the new ones.

    New triples without a split are training triples.  Where either has weights, triples without one
    weigh 1.
    """
    for parts in (triples, weights):
        if WHOLE in parts:
            parts["train"] = parts.pop(WHOLE)
    joined, joined_weights = {}, {}
    for split in SPLITS:  # one at a time, so that only one is held twice
        new, own, old = triples.pop(split, None), weights.pop(split, None), base.weights(split)
        count = 0 if new is None else len(new)
        joined[split] = np.concatenate([base.split(split), *([] if new is None else [new])])
        if own is not None or old is not None:
            before = np.ones(len(base.split(split)), np.float32) if old is None else old
            after = np.ones(count, np.float32) if own is None else own
            joined_weights[split] = np.concatenate([before, after])
    return joined, joined_weights


def _encode(batches: Batches, base: TripleStore | None = None) -> Encoded:
    known = () if base is None else (base.entities.array, base.relations.array)
    encoded = encode(batches, *known)
    check_labels(encoded.entities, encoded.relations)  # those of data sets by name are unchecked
    triples = encoded.triples
    if WHOLE not in triples:
        for split in SPLITS:
            triples.setdefault(split, np.empty((0, 3), np.int32))
    return encoded


def _joined(
    blocks: Mapping[str, Sequence[np.ndarray | None]],
    triples: Mapping[str, np.ndarray],
    needed: bool,
) -> dict[str, np.ndarray]:
    """Return the weights (T,) float32 of each split that has some; see `check_weights`.

    Args:
        blocks: By split, the weights of its batches, or None.
        triples: (T, 3) by split.
        needed: Whether the training triples must have weights.
    """
    own = {split: [part for part in parts if part is not None] for split, parts in blocks.items()}
    counts = {split: sum(map(len, parts)) for split, parts in own.items()}
    check_weights(counts, {split: len(rows) for split, rows in triples.items()}, needed)
    return {split: np.concatenate(parts) for split, parts in own.items() if parts}
