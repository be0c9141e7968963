"""Give labels ids, and turn triples of labels into triples of ids, on disk.

1. Each batch is dictionary-encoded alone.  Its triples are written as codes, and its labels to a
   file per bucket.  A label's bucket is the first bits of its hash.
2. Each bucket is numbered alone.  Its ids follow those of the bucket before.
3. Codes become ids.

Entities are in the order of their hashes, relations in alphabetical order.  So ids depend on the
set of labels only, and the ids of frequent entities are spread evenly over all ids.

Memory holds a few batches, the labels of one bucket, and all relations.

Shapes: N labels, T triples, M labels of a batch, B buckets.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import RELATION, TIME, WEIGHT
from kge_torchrec.data.labels import AppendedLabels, mapped, text_of
from kge_torchrec.data.sort import new_array
from kge_torchrec.data.streams import map_prefetched
from kge_torchrec.errors import DataError
from kge_torchrec.kernels.jit import kernel

BUCKETS = 64  # a power of two
NO_LABELS = pa.array([], pa.large_string())


class Numbered(NamedTuple):
    """Labels in order of id, and arrays by split; all but the relations are mapped files."""

    entities: pa.Array
    relations: pa.Array
    triples: dict[str, np.ndarray]  # (T, 3) int32
    weights: dict[str, np.ndarray]  # (T,) float32, of the splits that have some
    times: dict[str, np.ndarray]  # (T,) int64, float64 or datetime64, likewise


def number(
    batches: Iterable[tuple[str, pa.RecordBatch]],
    folder: Path,
    known: tuple[pa.Array, pa.Array] = (NO_LABELS, NO_LABELS),
    others: Callable[[], pa.Array] | None = None,
) -> Numbered:
    """Number the labels of batches, and write their triples.

    Args:
        batches: Split, and a batch of the large_string columns head, relation, tail, and of weight
            (float32) and time where there are some.
        folder: The folder for files.
        known: Labels of entities and of relations that have the first ids, in this order.
        others: Returns, once the batches are read, distinct labels of entities that may be in no
            triple.

    Raises:
        DataError: Only some triples of a split have weights, or times are of several kinds.
    """
    known_entities, relations = known
    parts: list[tuple[str, int, np.ndarray]] = []  # of each batch: split, rows, labels by bucket
    kinds: dict[tuple[str, str], list[tuple[pa.DataType, int]]] = defaultdict(list)
    with ExitStack() as stack:

        def scratch() -> IO[bytes]:
            return stack.enter_context(tempfile.TemporaryFile(dir=folder))

        buckets = [AppendedLabels(scratch(), scratch()) for _ in range(BUCKETS)]
        columns: dict[tuple[str, str], IO[bytes]] = defaultdict(scratch)
        filled = (item for item in batches if item[1].num_rows)
        for split, codes, names, entities, others_of in map_prefetched(_encoded, filled):
            relations, number_of = _encode_behind(relations, names)
            codes[:, RELATION] = number_of[codes[:, RELATION]]
            columns[split, "codes"].write(codes.data)
            for name, values in others_of.items():
                columns[split, name].write(_plain(values).view(np.uint8).data)
                kinds[split, name].append((values.type, len(values)))
            parts.append((split, len(codes), entities.append_to(buckets)))
        if others is not None:
            _by_bucket(others()).append_to(buckets)
        ids, labels = scratch(), AppendedLabels(scratch(), scratch())
        starts = _number_buckets(buckets, known_entities, ids, labels)
        order = _alphabetical(relations, len(known[1]))
        own_ids = mapped(ids, np.int32), starts
        triples = _triples(parts, columns, own_ids, inverse(order), folder)
        weights: dict[str, np.ndarray] = {}
        times: dict[str, np.ndarray] = {}
        for (split, name), own in kinds.items():
            if sum(count for _, count in own) < len(triples[split]):
                raise DataError(f"{split}: some of its triples have a {name} and others have none")
            target = weights if name == WEIGHT else times
            target[split] = _column(columns[split, name], own, folder / f"{split}-{name}.npy")
        return Numbered(labels.read(), relations.take(pa.array(order)), triples, weights, times)


class _ByBucket(NamedTuple):
    """Labels (M,) in the order of their buckets, and where each bucket starts, (B + 1,)."""

    labels: pa.Array
    bounds: np.ndarray
    order: np.ndarray  # (M,) their places before

    def append_to(self, buckets: list[AppendedLabels]) -> np.ndarray:
        """Append the labels to their buckets; return the sizes (B,)."""
        for bucket, (low, high) in zip(buckets, pairwise(self.bounds.tolist()), strict=True):
            bucket.add(self.labels[low:high])
        return np.diff(self.bounds)


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
) -> tuple[str, np.ndarray, pa.Array, _ByBucket, dict[str, pa.Array]]:
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
    others = {name: batch[name] for name in (WEIGHT, TIME) if name in batch.schema.names}
    return split, codes, relations.dictionary, entities, others


def _number_buckets(
    buckets: list[AppendedLabels], known: pa.Array, ids: IO[bytes], entities: AppendedLabels
) -> np.ndarray:
    """Write the id of each label of the buckets (with repeats), and the distinct labels.

    Labels that are ``known`` have the first ids.  ``ids`` takes int32, and ``entities`` the labels
    in order of id.  Returns where the ids of each bucket start, (B,).
    """
    first, done, starts = len(known), 0, []
    entities.add(known)
    old = _by_bucket(known)
    for bucket, (low, high) in zip(buckets, pairwise(old.bounds.tolist()), strict=True):
        labels = bucket.read()
        distinct, codes = _encode_behind(old.labels[low:high], labels)
        new = distinct[high - low :]
        order = _by_hash(new)
        entities.add(new.take(pa.array(order)))
        id_of = np.concatenate([old.order[low:high], first + inverse(order)]).astype(np.int32)
        ids.write(id_of[codes].data)
        starts.append(done)
        first, done = first + len(new), done + len(labels)
    return np.array(starts)


def _triples(
    parts: list[tuple[str, int, np.ndarray]],
    columns: dict[tuple[str, str], IO[bytes]],
    entities: tuple[np.ndarray, np.ndarray],
    relations: np.ndarray,
    folder: Path,
) -> dict[str, np.ndarray]:
    """Write the triples of each split as ids.

    ``parts`` and ``columns`` are those of `number`; ``entities`` are ids of the labels of all
    buckets, and where each bucket starts (B,); ``relations`` has the id of each code.
    """
    totals: dict[str, int] = defaultdict(int)
    for split, rows, _ in parts:
        totals[split] += rows
    triples = {s: new_array(folder / f"{s}.npy", np.int32, (n, 3)) for s, n in totals.items()}
    codes = {split: mapped(columns[split, "codes"], np.int32).reshape(-1, 3) for split in totals}
    done = dict.fromkeys(totals, 0)
    ids, starts = entities
    for split, rows, sizes in parts:
        ends = starts + sizes
        own = np.concatenate([ids[low:high] for low, high in zip(starts, ends, strict=True)])
        starts = ends
        here = slice(done[split], done[split] + rows)
        for column in (0, 2):
            triples[split][here, column] = own[codes[split][here, column]]
        triples[split][here, 1] = relations[codes[split][here, 1]]
        done[split] = here.stop
    return triples


def _column(file: IO[bytes], parts: list[tuple[pa.DataType, int]], path: Path) -> np.ndarray:
    """Write a column (T,) of weights or times from the values of all batches.

    ``parts`` are the type and the number of the values of each batch.
    """
    try:
        schemas = [pa.schema([("x", kind)]) for kind in dict.fromkeys(kind for kind, _ in parts)]
        joined = pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException as error:
        kinds = " and ".join(sorted({str(kind) for kind, _ in parts}))
        raise DataError(
            f"times are {kinds}: write them alike, all as numbers or all as dates, with a time "
            "zone or without"
        ) from error
    dtype = _plain(pa.array([], joined)).dtype
    column, done = new_array(path, dtype, (sum(count for _, count in parts),)), 0
    values = mapped(file, np.uint8)
    for kind, count in parts:
        width = kind.bit_width // 8
        own = pa.Array.from_buffers(kind, count, [None, pa.py_buffer(values[: count * width])])
        column[done : done + count] = _plain(own.cast(joined))
        values, done = values[count * width :], done + count
    return column


def _plain(values: pa.Array) -> np.ndarray:
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False))


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


def _encode_behind(first: pa.Array, labels: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Return distinct labels, the first ones in their order; and the codes of others (M,)."""
    encoded = pa.chunked_array([first, labels], pa.large_string()).dictionary_encode()
    if not encoded.chunks:
        return first, np.empty(0, np.int32)
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
    return encoded.chunk(0).dictionary, codes[len(first) :]
