"""Give labels ids on disk: as `labels.encode` does, in bounded memory.

1. `read_batches` writes a file per batch: triples as codes, and the labels of the batch by bucket.
   A label's bucket is a hash of it.
2. `number_labels` takes one group of buckets after another, which fits in memory, and numbers their
   distinct labels.
3. `write_ids` goes through the batches once more.  New labels get the next ids, in the order of
   `labels.encode`, and codes become ids.

Shapes: N labels, T triples, M labels of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from kge_torchrec.data import HEAD, RELATION, TAIL
from kge_torchrec.data.labels import Labels, check_labels, encode_batch, text_of
from kge_torchrec.data.large.work import Arrays, WorkFolder, npy_writer, write_arrays
from kge_torchrec.data.reading import Batches
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.data.streams import WORKERS, map_prefetched
from kge_torchrec.errors import DataError
from kge_torchrec.kernels.jit import kernel

BUCKETS = 1 << 10
BYTES_PER_LABEL = 128  # of a group in memory, at most, besides its text


@kernel
def _buckets(starts: np.ndarray, text: np.ndarray, buckets: np.ndarray) -> None:
    """Fill in a bucket (M,) for each label, by FNV-1a and a last multiplication."""
    for label in range(len(buckets)):
        code = np.uint64(14695981039346656037)
        for place in range(starts[label], starts[label + 1]):
            code = (code ^ np.uint64(text[place])) * np.uint64(1099511628211)
        code = (code ^ (code >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        buckets[label] = code >> np.uint64(54)


def _batch_path(work: WorkFolder, number: int) -> Path:
    return work.path / f"batch-{number:06}.arrays"


def read_batches(work: WorkFolder, batches: Batches) -> int:
    """Write a file for each batch, and return their number; files that are there stay.

    Raises:
        DataError: The batches are not those of an earlier start.
    """

    def write(item: tuple[int, tuple[str, pa.RecordBatch]]) -> None:
        number, (split, batch) = item
        path = _batch_path(work, number)
        if not path.exists():
            _write_batch(path, split, batch)
            return
        info = Arrays(path).info
        if (info["split"], info["rows"]) != (split, batch.num_rows):
            raise DataError(
                f"{work.path}: batch {number:,} of the files is not that of an earlier start, and "
                "what it has finished was removed; start again"
            )

    filled = (item for item in batches if item[1].num_rows)
    with _few_threads():
        return sum(1 for _ in map_prefetched(write, enumerate(filled)))


@contextmanager
def _few_threads() -> Iterator[None]:
    """Let pyarrow read a few batches ahead: one per thread, of which it has one per processor."""
    before = pa.cpu_count()
    pa.set_cpu_count(min(before, WORKERS))
    try:
        yield
    finally:
        pa.set_cpu_count(before)


def _write_batch(path: Path, split: str, batch: pa.RecordBatch) -> None:
    _, entities, relations, codes, weights, _ = encode_batch((split, batch))
    check_labels(entities, relations)
    starts, text = text_of(entities)
    buckets = np.empty(len(entities), np.uint16)
    _buckets(starts, text, buckets)
    order = np.argsort(buckets, kind="stable")
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    codes[:, 0::2] = position[codes[:, 0::2]]
    starts, text = text_of(entities.take(pa.array(order)))
    bounds = np.searchsorted(buckets[order], np.arange(BUCKETS + 1))
    names, name_text = text_of(relations)
    arrays = {
        "codes": codes,
        "places": order.astype(np.int32),  # in the order of the labels' first appearance
        "lengths": np.diff(starts).astype(np.int32),
        "text": text,
        "bounds": bounds.astype(np.int32),  # the labels of each bucket
        "ends": starts[bounds],  # the text of each bucket
        "names": names,
        "name_text": name_text,
    }
    if weights is not None:
        arrays["weights"] = weights.astype(np.float32, copy=False)
    info = {"split": split, "rows": len(codes), "weighted": weights is not None}
    write_arrays(path, arrays, **info)


def labels_from(starts: np.ndarray, text: np.ndarray) -> pa.Array:
    """Return labels (M,) from where each starts, (M + 1,) int64 from 0 on, and their bytes."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(starts)), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.large_string(), len(starts) - 1, buffers)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _groups(bounds: np.ndarray, ends: np.ndarray, most_bytes: int) -> list[list[int]]:
    """Return ranges of buckets whose labels fit in memory.

    Args:
        bounds: (batches, BUCKETS + 1), the labels of each batch by bucket.
        ends: The same for the bytes of their text.
        most_bytes: Bytes of a group; a single bucket may have more.
    """
    sizes = np.diff(bounds, axis=1).sum(0) * BYTES_PER_LABEL + 2 * np.diff(ends, axis=1).sum(0)
    groups, first, size = [], 0, 0
    for bucket, own in enumerate(sizes.tolist()):
        if size and size + own > most_bytes:
            groups.append([first, bucket])
            first, size = bucket, 0
        size += own
    return [*groups, [first, BUCKETS]]


def number_labels(work: WorkFolder, batches: int, most_bytes: int) -> dict[str, Any]:
    """Number the distinct labels of each group of buckets, in files ``labels-0.npy``, ....

    Returns:
        The ranges of buckets of the groups, and the number of labels of each.
    """
    files = [Arrays(_batch_path(work, number)) for number in range(batches)]
    bounds = np.stack([file.read("bounds") for file in files]).astype(np.int64)
    ends = np.stack([file.read("ends") for file in files])
    groups = _groups(bounds, ends, most_bytes)
    counts = []
    with work.bar("number labels", int(bounds[:, -1].sum()), " labels") as bar:
        for place, group in enumerate(groups):
            spans = bounds[:, group], ends[:, group]
            number = partial(_number_group, work.path / f"labels-{place}.npy", files, spans)
            # A stage of its own, so that a later start need not number the group again.
            counts.append(work.once(f"group {place}", number))
            bar.update(int(np.diff(spans[0]).sum()))
    return {"groups": groups, "counts": counts}


def _number_group(path: Path, files: list[Arrays], spans: tuple[np.ndarray, np.ndarray]) -> int:
    """Write the number of each label of a group, in the order of the batches; return how many."""
    chunks = [
        labels_from(_starts(file.read("lengths", *rows)), file.read("text", *part))
        for file, rows, part in zip(files, spans[0].tolist(), spans[1].tolist(), strict=True)
    ]
    encoded = pa.chunked_array(chunks, pa.large_string()).dictionary_encode()
    with npy_writer(path, (len(encoded),), np.int32) as out:
        for chunk in encoded.chunks:
            chunk.indices.to_numpy().tofile(out)
    return len(encoded.chunk(0).dictionary)


class _Numbers:
    """The files of the groups, read batch by batch, and the id of each number.

    Args:
        work: The folder.
        groups: Ranges of buckets.
        counts: Distinct labels of each group.
    """

    def __init__(self, work: WorkFolder, groups: list[list[int]], counts: list[int]):
        self._files = [
            (work.path / f"labels-{place}.npy").open("rb") for place in range(len(groups))
        ]
        for file in self._files:
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
        self._bounds = np.array([low for low, _ in groups] + [groups[-1][1]])
        self._first = np.concatenate([[0], np.cumsum(counts)])  # number of each group's first label
        self._seen = self._first[:-1].copy()
        self._ids = np.empty(self._first[-1], np.int32)
        self.known = 0

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def of(self, batch: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids (M,) of the labels of the next batch, and which of them are new."""
        bounds = batch.read("bounds")[self._bounds]
        numbers = np.empty(bounds[-1], np.int64)
        is_new = np.empty(bounds[-1], bool)
        for group, file in enumerate(self._files):
            part = slice(bounds[group], bounds[group + 1])
            numbers[part] = np.fromfile(file, np.int32, part.stop - part.start)
            numbers[part] += self._first[group]
            # Numbers ascend by first appearance, and a batch has each label once.
            is_new[part] = numbers[part] >= self._seen[group]
            self._seen[group] += is_new[part].sum()
        new = np.flatnonzero(is_new)
        new = new[np.argsort(batch.read("places")[new])]
        self._ids[numbers[new]] = np.arange(self.known, self.known + len(new), dtype=np.int32)
        self.known += len(new)
        return self._ids[numbers], new


def write_ids(work: WorkFolder, batches: int, numbered: dict[str, Any]) -> dict[str, Any]:
    """Write the triples of each split as ids, ``ids-train.npy``, ..., and the labels of the store.

    The bits of weights are a fourth column.

    Returns:
        By split: how many triples, and how many of them have weights.
    """
    files = [Arrays(_batch_path(work, number)) for number in range(batches)]
    rows: dict[str, int] = {}
    weighted: dict[str, int] = {}
    for file in files:
        split, count = file.info["split"], file.info["rows"]
        rows[split] = rows.get(split, 0) + count
        weighted[split] = weighted.get(split, 0) + (count if file.info["weighted"] else 0)
    numbers = _Numbers(work, numbered["groups"], numbered["counts"])
    relations = Labels()
    size = sum(numbered["counts"])
    with ExitStack() as stack:
        stack.callback(numbers.close)
        shapes = {split: (count, 4 if weighted[split] else 3) for split, count in rows.items()}
        outs = {
            split: stack.enter_context(npy_writer(work.path / f"ids-{split}.npy", shape, np.int32))
            for split, shape in shapes.items()
        }
        text: IO[bytes] = stack.enter_context((work.path / "entities.text").open("wb"))
        lengths: IO[bytes] = stack.enter_context((work.path / "entities.lengths").open("wb"))
        bar = stack.enter_context(work.bar("write ids", sum(rows.values()), " triples"))
        for file in files:
            ids, new = numbers.of(file)
            labels = labels_from(_starts(file.read("lengths")), file.read("text"))
            starts, own = text_of(labels.take(pa.array(new)))
            np.diff(starts).astype(np.int32).tofile(lengths)
            own.tofile(text)
            triples = file.read("codes").reshape(-1, 3)
            for column in (HEAD, TAIL):
                triples[:, column] = ids[triples[:, column]]
            names = labels_from(file.read("names"), file.read("name_text"))
            relations.add(names, triples[:, RELATION])
            relations.merge()
            split = file.info["split"]
            if shapes[split][1] > 3:  # where a batch has none, `check_weights` says so
                has = file.info["weighted"]
                weights = file.read("weights") if has else np.zeros(len(triples), np.float32)
                triples = np.column_stack([triples, weights.view(np.int32)])
            triples.tofile(outs[split])
            bar.update(len(triples))
    store = work.path / "store"
    _save_entities(work.path, size, store / "entities.arrow")
    Vocabulary(relations.values).save(store / "relations.arrow")
    return {"rows": rows, "weighted": weighted}


def _save_entities(folder: Path, size: int, target: Path) -> None:
    """Write the labels of all entities as ``Vocabulary`` does, from mapped files."""
    starts = np.lib.format.open_memmap(folder / "entities.starts.npy", "w+", np.int64, (size + 1,))
    done = 0
    for lengths in _pieces(folder / "entities.lengths", np.int32, 1 << 20):
        part = np.cumsum(lengths, dtype=np.int64)
        starts[done + 1 : done + 1 + len(part)] = part + starts[done]
        done += len(part)
    text = np.memmap(folder / "entities.text", np.uint8, "r")
    Vocabulary(labels_from(starts, text)).save(target)


def _pieces(path: Path, dtype: Any, size: int) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        while len(piece := np.fromfile(file, dtype, size)):
            yield piece
