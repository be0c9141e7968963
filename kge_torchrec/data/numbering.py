"""Give labels ids, and turn triples of labels into triples of ids, on disk.

Each batch is dictionary-encoded alone: its triples are written as codes, and its labels in buckets,
by the first bits of their hashes.  Then each bucket is numbered alone, and codes become ids.
Entities are in the order of their hashes, relations in alphabetical order: ids depend on the set of
labels only, and frequent entities are spread evenly over all ids.  Memory holds a few batches, the
labels of one bucket, and all relations.

Shapes: N labels, T triples, M labels of a batch, B buckets.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import HEAD, RELATION, SPLITS, TAIL, TIME, WEIGHT
from kge_torchrec.data.labels import AppendedLabels, mapped, text_of
from kge_torchrec.data.sort import scratch_array
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.streams import map_prefetched
from kge_torchrec.errors import DataError
from kge_torchrec.kernels.jit import kernel

BUCKETS = 64  # a power of two
NO_LABELS = pa.array([], pa.large_string())


class Rows(NamedTuple):
    """The triples of a split; the arrays are mapped files."""

    triples: np.ndarray  # (T, 3) int32
    weights: np.ndarray | None = None  # (T,) float32
    times: np.ndarray | None = None  # (T,) float64 or datetime64


NO_ROWS = Rows(np.empty((0, 3), np.int32))


def number(
    batches: Iterable[tuple[str, pa.RecordBatch]],
    folder: Path,
    base: TripleStore | None = None,
    others: Callable[[], pa.Array] | None = None,
) -> tuple[pa.Array, pa.Array, dict[str, Rows]]:
    """Return the labels of batches in order of id (entities, mapped; relations); rows by split.

    Args:
        batches: Split, and a batch of the large_string columns head, relation, tail, and of weight
            (float32) and time (float64, or microseconds) where there are some.
        folder: The folder for files.
        base: Its labels keep their ids, and its rows come first.  If they or new triples of a split
            have weights, triples without one weigh 1.
        others: Returns, once the batches are read, distinct labels of entities that may be in no
            triple.

    Raises:
        DataError: Only some triples of a split have weights, or times are numbers and dates.
    """
    known = (NO_LABELS,) * 2 if base is None else (base.entities.array, base.relations.array)
    relations = known[1]
    parts: list[tuple[str, int]] = []  # split and rows of each batch
    bounds: list[np.ndarray] = []  # where its labels of each bucket start among all, (B + 1,)
    dtypes: dict[tuple[str, str], set[np.dtype]] = defaultdict(set)  # of weights and times
    with ExitStack() as stack:

        def scratch() -> IO[bytes]:
            return stack.enter_context(tempfile.TemporaryFile(dir=folder))

        labels = AppendedLabels(scratch(), scratch())
        columns: dict[tuple[str, str], IO[bytes]] = defaultdict(scratch)
        done: dict[str, int] = {}
        weighted = set()
        if base is not None:
            for split in SPLITS:
                rows, weights = base.split(split), base.weights(split)
                weighted |= set() if weights is None else {split}
                weights = _ones(rows) if weights is None else weights
                columns[split, "codes"].write(np.ascontiguousarray(rows).data)
                columns[split, WEIGHT].write(np.ascontiguousarray(weights).data)
                done[split], dtypes[split, WEIGHT] = len(rows), {weights.dtype}
        filled = (item for item in batches if item[1].num_rows)
        for split, codes, names, entities, others_of in map_prefetched(_encoded, filled):
            if WEIGHT in others_of:
                weighted.add(split)
            elif base is not None:
                others_of[WEIGHT] = _ones(codes)
            relations, (number_of,) = _encode_behind(relations, [names])
            codes[:, RELATION] = number_of[codes[:, RELATION]]
            columns[split, "codes"].write(codes.data)
            for name, values in others_of.items():
                columns[split, name].write(values.view(np.uint8).data)
                dtypes[split, name].add(values.dtype)
            parts.append((split, len(codes)))
            bounds.append(labels.add(entities.labels) + entities.bounds)
        if others is not None:
            last = _by_bucket(others())
            bounds.append(labels.add(last.labels) + last.bounds)
        distinct = AppendedLabels(scratch(), scratch())
        ids = _number_buckets(labels.read(), bounds, known[0], distinct, folder)
        order = _alphabetical(relations, len(known[1]))
        relation_ids, splits = inverse(order), {}
        for split in [split for split, name in columns if name == "codes"]:
            splits[split] = Rows(mapped(columns[split, "codes"], np.int32).reshape(-1, 3))
            done.setdefault(split, 0)
        for (split, count), at in zip(parts, bounds, strict=False):
            here, ends = splits[split].triples[done[split] :][:count], ids[at[0] : at[-1]]
            here[:, [HEAD, TAIL]] = ends[here[:, [HEAD, TAIL]]]
            here[:, RELATION] = relation_ids[here[:, RELATION]]
            done[split] += count
        for (split, name), (dtype, *more) in dtypes.items():
            if name == WEIGHT and split not in weighted:
                continue
            if more:
                raise DataError(f"{split}: some of its times are numbers and others dates")
            values = mapped(columns[split, name], dtype)
            if len(values) < len(splits[split].triples):
                raise DataError(f"{split}: some of its triples have a {name} and others have none")
            field = "weights" if name == WEIGHT else "times"
            splits[split] = splits[split]._replace(**{field: values})
        return distinct.read(), relations.take(pa.array(order)), splits


def _ones(rows: np.ndarray) -> np.ndarray:
    return np.ones(len(rows), np.float32)


class _ByBucket(NamedTuple):
    """Labels (M,) in the order of their buckets, and where each bucket starts, (B + 1,)."""

    labels: pa.Array
    bounds: np.ndarray
    order: np.ndarray  # (M,) their places before


def hashes(labels: pa.Array) -> np.ndarray:
    """Return a hash of the text of each label, (N,) uint64, see ``labels.hash_of``."""
    starts, text = text_of(labels)
    codes = np.empty(len(labels), np.uint64)
    _hash(starts, text, codes)
    return codes


@kernel
def _hash(starts: np.ndarray, text: np.ndarray, codes: np.ndarray) -> None:
    """Fill in FNV-1a with a last multiplication, which mixes the first bits."""
    for label in range(len(codes)):
        code = np.uint64(14695981039346656037)
        for place in range(starts[label], starts[label + 1]):
            code = (code ^ np.uint64(text[place])) * np.uint64(1099511628211)
        code = (code ^ (code >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        codes[label] = code


def _by_bucket(labels: pa.Array) -> _ByBucket:
    bucket = (hashes(labels) >> np.uint64(64 - (BUCKETS.bit_length() - 1))).astype(np.uint16)
    order = np.argsort(bucket, kind="stable")
    bounds = np.append(0, np.cumsum(np.bincount(bucket, minlength=BUCKETS)))
    return _ByBucket(labels.take(pa.array(order)), bounds, order)


def _encoded(
    item: tuple[str, pa.RecordBatch],
) -> tuple[str, np.ndarray, pa.Array, _ByBucket, dict[str, np.ndarray]]:
    """Return split, codes (T, 3), labels of relations and of entities, and other columns."""
    split, batch = item
    ends = pa.chunked_array([batch["head"], batch["tail"]]).dictionary_encode()
    relations = batch["relation"].dictionary_encode()
    entities = _by_bucket(ends.chunk(0).dictionary)
    code = inverse(entities.order)
    codes = np.empty((batch.num_rows, 3), np.int32)
    codes[:, 0] = code[ends.chunk(0).indices]
    codes[:, 1] = relations.indices
    codes[:, 2] = code[ends.chunk(1).indices]
    others = {
        name: batch[name].to_numpy(zero_copy_only=False)
        for name in (WEIGHT, TIME)
        if name in batch.schema.names
    }
    return split, codes, relations.dictionary, entities, others


def _number_buckets(
    labels: pa.Array,
    bounds: list[np.ndarray],
    known: pa.Array,
    distinct: AppendedLabels,
    folder: Path,
) -> np.ndarray:
    """Return the id of each label (M,) of all batches; append the distinct labels in order of id.

    Labels that are ``known`` have the first ids.
    """
    first, old = len(known), _by_bucket(known)
    distinct.add(known)
    ids = scratch_array(folder, np.int32, (len(labels),))
    for bucket in range(BUCKETS):
        low, high = old.bounds[bucket : bucket + 2].tolist()
        here = [slice(*own[bucket : bucket + 2].tolist()) for own in bounds]
        if low == high and all(own.start == own.stop for own in here):
            continue
        both, codes = _encode_behind(old.labels[low:high], [labels[own] for own in here])
        new = both[high - low :]
        order = _by_hash(new)
        distinct.add(new.take(pa.array(order)))
        id_of = np.concatenate([old.order[low:high], first + inverse(order)]).astype(np.int32)
        for own, part in zip(here, codes, strict=True):
            ids[own] = id_of[part]
        first += len(new)
    return ids


def inverse(order: np.ndarray) -> np.ndarray:
    """Return the inverse of a permutation (N,), int32."""
    places = np.empty(len(order), np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    return places


def _alphabetical(labels: pa.Array, first: int) -> np.ndarray:
    """Return the places of labels in alphabetical order, behind the first ones, which stay."""
    order = pc.array_sort_indices(labels[first:]).to_numpy().astype(np.int64)
    return np.concatenate([np.arange(first), first + order])


def _by_hash(labels: pa.Array) -> np.ndarray:
    """Return the places (N,) of distinct labels, ordered by their hashes, then by their text."""
    codes = hashes(labels)
    order = np.argsort(codes)
    if (np.diff(codes[order]) == 0).any():
        order = np.lexsort([inverse(_alphabetical(labels, 0)), codes])
    return order


def _encode_behind(first: pa.Array, others: list[pa.Array]) -> tuple[pa.Array, list[np.ndarray]]:
    """Return distinct labels, the first ones in their order, and the codes of all others."""
    encoded = pa.chunked_array([first, *others], pa.large_string()).dictionary_encode()
    codes = [np.empty(0, np.int32), *(chunk.indices.to_numpy() for chunk in encoded.chunks)]
    ends = np.cumsum([len(first), *map(len, others)])
    labels = encoded.chunk(0).dictionary if encoded.chunks else first
    return labels, np.split(np.concatenate(codes), ends)[1:-1]
