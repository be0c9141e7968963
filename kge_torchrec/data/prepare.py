"""From triples of strings, in files or in memory, to a `TripleStore`.

Labels become integer ids in bounded memory and without a Python object per label: each batch is
dictionary-encoded on its own, several at a time; the small dictionaries of the batches are then
themselves dictionary-encoded, which gives the map from batch ids to final ids.  Triples that come
without a split are split at random.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from kge_torchrec.data import report as reports
from kge_torchrec.data.filter_index import SIDES, SideIndex, build_side
from kge_torchrec.data.prefetch import map_prefetched
from kge_torchrec.data.readers import (
    SPLITS,
    SUFFIXES,
    WHOLE,
    Reader,
    Sources,
    find_sources,
    read_triples,
)
from kge_torchrec.data.sort import CHUNK, repeats
from kge_torchrec.data.store import TripleStore, check_writable, new_store, write_store
from kge_torchrec.data.streams import COLUMNS
from kge_torchrec.errors import DataError

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
    reader: Reader | None = None,
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
        reader: reads files of a format that is not ours; None goes by their names.
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
    files = find_sources(sources, SUFFIXES if reader is None else reader.suffixes)
    notes: dict[str, Any] = {
        "sources": {split: [str(path) for path in paths] for split, paths in files.items()}
    }
    if WHOLE in files:
        notes["split"] = {"ratio": list(ratio), "seed": seed}
    dropped: Counter[str] = Counter()
    notes["literals"] = dropped  # filled in while reading
    return _prepare(
        _read(files, has_header, dropped if literals == "drop" else None, reader, progress),
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


def extend_store(
    base: TripleStore,
    new: Sources | Mapping[str, InMemory],
    output: str | Path,
    *,
    has_header: bool | None = None,
    allow_unseen_relations: bool = False,
    literals: str = "drop",
    reader: Reader | None = None,
    progress: bool = True,
) -> TripleStore:
    """Writes a store of the triples of ``base`` and new ones, whole or not at all.

    Labels of ``base`` keep their ids, new ones follow; so do the triples of every split.  What
    comes without a split is trained on.  Triples that ``base`` has in the same split are dropped
    and counted.  The report's ``extends`` says where the new begins: numbers of ``entities``,
    ``relations``, ``triples`` (train) and ``valid`` of ``base``.

    new: as ``sources`` of `prepare`, or splits in memory as `prepare_triples` takes them.  The rest
        as for `prepare`.

    Raises:
        DataError, StoreError: as `prepare`, and where nothing is new.
    """
    size = base.size
    notes: dict[str, Any] = {"extends": asdict(size)}
    if isinstance(new, Mapping):
        batches: Batches = (
            (split, batch) for split in SPLITS for batch in batches_of(split, new.get(split, ()))
        )
    else:
        files = find_sources(new, SUFFIXES if reader is None else reader.suffixes)
        named = {split: [str(path) for path in paths] for split, paths in files.items()}
        dropped: Counter[str] = Counter()
        notes |= {"sources": named, "literals": dropped}
        left_out = dropped if literals == "drop" else None
        batches = _read(files, has_header, left_out, reader, progress)
    return _prepare(
        batches, Path(output), (1, 0, 0), 0, allow_unseen_relations, False, progress, notes, base
    )


def _prepare(
    batches: Batches,
    output: Path,
    ratio: Sequence[float],
    seed: int,
    allow_unseen_relations: bool,
    overwrite: bool,
    progress: bool,
    notes: Mapping[str, Any],
    base: TripleStore | None = None,
) -> TripleStore:
    """base: whose labels and triples come first."""
    with new_store(output, overwrite) as directory:
        entities, relations, triples = _encode(batches, notes, base)
        sizes = (len(entities), len(relations))
        with tqdm(total=6, desc="index", unit="table", disable=_hidden(progress)) as bar:
            if base is not None:
                triples = _after(base, triples)
            triples, duplicates = _without_repeats(triples, sizes)
            if base is not None and all(len(triples[s]) == len(base.split(s)) for s in SPLITS):
                raise DataError(f"none of the triples is new: {base.path} has them all")
            if WHOLE in triples:
                triples = divide(triples.pop(WHOLE), ratio, seed, *sizes)
            unseen = reports.unseen_relations(relations, triples)
            if unseen and not allow_unseen_relations:
                raise _unseen_error(unseen)
            indices: dict[str, dict[str, SideIndex]] = {}
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
    reader: Reader | None,
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
                for batch in read_triples(path, has_header, bar.update, on_literals, reader):
                    yield split, batch


def _count(counter: Counter[str], key: str, number: int) -> None:
    counter[key] += number


def _hidden(progress: bool) -> bool | None:
    return None if progress else True  # None: tqdm looks whether there is a terminal


def _after(base: TripleStore, triples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every split of ``base`` and then what is new; what has no split is trained on."""
    if WHOLE in triples:
        triples["train"] = triples.pop(WHOLE)
    joined = {}
    for split in SPLITS:  # one at a time, so that only one is held twice
        new = triples.pop(split, None)
        joined[split] = np.concatenate([base.split(split), *([] if new is None else [new])])
    return joined


def _encode(
    batches: Batches, notes: Mapping[str, Any], base: TripleStore | None = None
) -> tuple[pa.Array, pa.Array, dict[str, np.ndarray]]:
    known = () if base is None else (base.entities.array, base.relations.array)
    entities, relations, triples = encode(batches, *known)
    if WHOLE not in triples:
        for split in SPLITS:
            triples.setdefault(split, np.empty((0, 3), np.int32))
    if base is not None and any(map(len, triples.values())):
        return entities, relations, triples
    if not len(triples[WHOLE if WHOLE in triples else "train"]):
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
        again = repeats([*rows.T], (sizes[0], sizes[1], sizes[0]))
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


# Dictionaries of batches are merged when they hold this much, so that they never hold all text.
MERGE_BYTES = 1 << 30


def encode(
    batches: Iterable[tuple[str, pa.RecordBatch]],
    entities: pa.Array | None = None,
    relations: pa.Array | None = None,
) -> tuple[pa.Array, pa.Array, dict[str, np.ndarray]]:
    """Numbers labels by their first appearance, batch by batch.

    Args:
        batches: (split, batch of the large_string columns head, relation, tail).
        entities, relations: labels that have the first ids, in this order.

    Returns:
        entity labels (N,), relation labels (R,), and per split the ids (T, 3) int32.
    """
    of_entities, of_relations = _Labels(entities), _Labels(relations)
    blocks: dict[str, list[np.ndarray]] = defaultdict(list)
    filled = (item for item in batches if item[1].num_rows)
    for split, new_entities, new_relations, codes in map_prefetched(_encode_batch, filled):
        of_entities.add(new_entities, codes[:, 0::2])
        of_relations.add(new_relations, codes[:, 1:2])
        blocks[split].append(codes)
    of_entities.merge()
    of_relations.merge()
    # One split at a time, so that only one is held twice.
    triples = {split: np.concatenate(blocks.pop(split)) for split in list(blocks)}
    return of_entities.values, of_relations.values, triples


class _Labels:
    """One vocabulary in the making.  known: distinct labels that come first."""

    def __init__(self, known: pa.Array | None = None) -> None:
        self.values = pa.array([], pa.large_string()) if known is None else known
        self._pending: list[tuple[pa.Array, np.ndarray]] = []

    def add(self, labels: pa.Array, codes: np.ndarray) -> None:
        """Labels of one batch and the codes into them, which `merge` will overwrite."""
        self._pending.append((labels, codes))
        # Waiting for as much as there is already keeps the repeated merging linear.
        waiting = sum(pending.nbytes for pending, _ in self._pending)
        if waiting > max(MERGE_BYTES, self.values.nbytes):
            self.merge()

    def merge(self) -> None:
        if not self._pending:
            return
        labels = [self.values, *(pending for pending, _ in self._pending)]
        encoded = pa.chunked_array(labels, pa.large_string()).dictionary_encode()
        final = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
        # The labels so far come first and are distinct, hence keep their ids.
        start = len(self.values)
        for pending, codes in self._pending:
            codes[:] = final[start : start + len(pending)][codes]
            start += len(pending)
        self.values = encoded.chunk(0).dictionary
        self._pending = []


def _encode_batch(item: tuple[str, pa.RecordBatch]) -> tuple[str, pa.Array, pa.Array, np.ndarray]:
    """Split, labels of the entities and relations of a batch, and its triples as codes (T, 3)."""
    split, batch = item
    ends = pa.chunked_array([batch["head"], batch["tail"]]).dictionary_encode()
    relations = batch["relation"].dictionary_encode()
    codes = np.empty((batch.num_rows, 3), np.int32)
    codes[:, 0] = ends.chunk(0).indices
    codes[:, 1] = relations.indices
    codes[:, 2] = ends.chunk(1).indices
    return split, ends.chunk(0).dictionary, relations.dictionary, codes


def check_ratio(ratio: Sequence[float]) -> None:
    """Raises DataError unless ``ratio`` is three shares that sum to 1, the first positive."""
    if len(ratio) != 3 or min(ratio) < 0 or ratio[0] <= 0 or not math.isclose(sum(ratio), 1):
        raise DataError(
            f"ratio {tuple(ratio)}: give the shares of train, valid and test, which sum to 1, "
            "such as (0.9, 0.05, 0.05)"
        )


def divide(
    triples: np.ndarray, ratio: Sequence[float], seed: int, num_entities: int, num_relations: int
) -> dict[str, np.ndarray]:
    """Random splits of ``triples`` (T, 3), each in the order of the input.

    In a random order, the first triple of each entity and of each relation is bound to train;
    valid and test are drawn from the others, hence come out smaller than asked for where few
    others are left.
    """
    total = len(triples)
    order = np.random.default_rng(seed).permutation(total)
    bound = np.zeros(total, bool)
    for columns, size in (((0, 2), num_entities), ((1,), num_relations)):
        first = np.full(size, total)
        for start in range(0, total, CHUNK):
            rows = triples.take(order[start : start + CHUNK], axis=0)
            places = np.arange(start, start + len(rows))
            for column in columns:
                np.minimum.at(first, rows[:, column], places)
        bound[first[first < total]] = True
    free = order[~bound]
    num_valid, num_test = (round(total * share) for share in ratio[1:])
    if num_valid + num_test > len(free):
        num_valid = len(free) * num_valid // (num_valid + num_test)
        num_test = len(free) - num_valid
    split_of = np.zeros(total, np.int8)
    split_of[free[:num_valid]] = 1
    split_of[free[num_valid : num_valid + num_test]] = 2
    del order, bound, free  # before the triples are held twice
    return {
        split: triples.take(np.flatnonzero(split_of == index), axis=0)
        for index, split in enumerate(SPLITS)
    }


InMemory: TypeAlias = pa.Table | np.ndarray | Iterable[tuple[str, str, str]]


def batches_of(split: str, rows: InMemory) -> Iterator[pa.RecordBatch]:
    """Batches of the string columns head, relation, tail; none if there are no rows.

    Raises:
        DataError: naming split and triple: not three fields, or a label that is no string.
    """
    try:
        table = _table(split, rows).cast(pa.schema([(name, pa.large_string()) for name in COLUMNS]))
        table.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{split}: labels must be strings: {error}") from error
    for role in COLUMNS:
        missing = pc.fill_null(pc.equal(pc.binary_length(table[role]), 0), True)
        position = pc.index(missing, True).as_py()
        if position >= 0:
            raise DataError(f"{split}: triple {position}: the {role} is empty")
    yield from table.to_batches()


def _table(split: str, rows: InMemory) -> pa.Table:
    if isinstance(rows, pa.Table):
        columns = rows.columns
    elif isinstance(rows, np.ndarray):
        columns = [pa.array(column) for column in rows.T]
    else:
        rows = list(rows)
        for position, row in enumerate(rows):
            if len(row) != 3:
                raise DataError(f"{split}: triple {position} has {len(row)} fields: {row!r}")
        columns = [pa.array(column, pa.large_string()) for column in zip(*rows, strict=True)]
        columns = columns or [pa.array([], pa.large_string())] * 3
    if len(columns) != 3:
        raise DataError(f"{split}: {len(columns)} columns instead of head, relation, tail")
    return pa.table(list(columns), list(COLUMNS))
