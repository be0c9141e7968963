"""Read vectors of entities from files.

    .npy           (M, W) numbers, labels in a .txt of the same name beside it (`labels`)
    .safetensors   one tensor (M, W), labels in the same way
    .parquet       a column of strings and one of lists of W numbers

A folder stands for the file ``entities`` of one of these forms in it, as in an export.

Some thousand vectors are read at a time.

Shapes: M vectors, W elements each, m of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data.labels import read_label_file
from kge_torchrec.errors import DataError

ROWS = 1 << 14  # rows at a time


@dataclass(frozen=True)
class Vectors:
    """Labels, and their vectors in the same order."""

    source: Path
    labels: pa.Array  # (M,)
    width: int  # W
    rows: Callable[[], Iterator[np.ndarray]]  # yields (m, W) float32


def open_vectors(path: str | Path) -> Vectors:
    """Open the vectors of a file or folder; the labels are read, the vectors not yet.

    Raises:
        DataError: The file has none of the forms above; the message says what is wrong where.
    """
    path = Path(path)
    if path.is_dir():
        names = [f"entities{suffix}" for suffix in _READERS]
        there = [path / name for name in names if (path / name).is_file()]
        if len(there) != 1:
            what = f"there are {len(there)} of them" if there else "there is none"
            looked_for = ", ".join(names)
            raise DataError(
                f"{path}: looked for a run, an export or one of {looked_for}, and {what}"
            )
        (path,) = there
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder of vectors")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: vectors are read from {', '.join(_READERS)}, not from {path.suffix or 'this'}"
        )
    vectors = reader(path)
    if not len(vectors.labels) or not vectors.width:
        raise DataError(f"{path} has no vectors; check how it was written")
    return vectors


def numbers_of(vectors: Vectors, labels: pa.Array) -> np.ndarray:
    """Return the number of the vector of each label (N,): (N,) int64, -1 for none.

    Raises:
        DataError: Two vectors have the same label, or no label has one.
    """
    place = pc.index_in(vectors.labels, value_set=labels)
    ids = pc.fill_null(place, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    there = np.flatnonzero(ids >= 0)
    if not len(there):
        raise nothing_in_common(vectors.source, vectors.labels, labels)
    counts = np.bincount(ids[there], minlength=len(labels))
    if counts.max() > 1:
        label = labels[int(counts.argmax())].as_py()
        places = (np.flatnonzero(ids == counts.argmax())[:2] + 1).tolist()
        raise DataError(
            f"{vectors.source}: {label!r} has {counts.max()} vectors (number {places[0]:,} and "
            f"{places[1]:,}); leave one of them"
        )
    numbers = np.full(len(labels), -1)
    numbers[ids[there]] = there
    return numbers


def nothing_in_common(source: Path, labels: pa.Array, entities: pa.Array) -> DataError:
    """Return the error for a source of which no label is an entity of the graph."""
    examples, others = (", ".join(map(repr, x[:3].to_pylist())) for x in (labels, entities))
    return DataError(
        f"{source}: none of its {len(labels):,} labels ({examples}, ...) is an entity of the graph "
        f"({others}, ...)"
    )


def check_finite(vectors: Vectors, first: int, rows: np.ndarray, wanted: np.ndarray) -> None:
    """Raise DataError, with the label, if one of the wanted rows has NaN or infinity.

    ``first`` is the number of the first of the rows (m, W) among all, and ``wanted`` are places
    among them.
    """
    bad = wanted[~np.isfinite(rows[wanted]).all(1)]
    if len(bad):
        place = first + int(bad[0])
        raise DataError(
            f"{vectors.source}: the vector of {vectors.labels[place].as_py()!r} (number "
            f"{place + 1:,}) holds NaN or infinity"
        )


def _matrix(path: Path) -> Vectors:
    """Return the rows of a table (M, W), with labels beside it."""
    from safetensors import SafetensorError, safe_open

    table: Any
    try:
        if path.suffix.lower() == ".npy":
            table = np.load(path, mmap_mode="r")
            shape, is_real = table.shape, table.dtype.kind in "fiu"
        else:
            tensors = safe_open(path, "numpy")
            names = list(tensors.keys())
            table = tensors.get_slice(names[0]) if len(names) == 1 else None
            shape = () if table is None else tuple(table.get_shape())
            is_real = table is not None and table.get_dtype() in ("F16", "F32", "F64")
    except (ValueError, EOFError, SafetensorError) as error:
        raise DataError(f"{path} is no readable {path.suffix} file: {error}") from error
    if table is None:
        raise DataError(f"{path} has {len(names)} tensors; save one tensor with all vectors")
    if len(shape) != 2 or not is_real:
        raise DataError(f"{path}: vectors are real numbers of shape (M, W), this has {shape}")
    count, width = shape
    labels = path.with_suffix(".txt")
    if not labels.is_file():
        raise DataError(f"{path}: its labels should be in {labels.name} beside it, one a line")

    def rows() -> Iterator[np.ndarray]:
        for first in range(0, count, ROWS):
            yield np.asarray(table[first : min(first + ROWS, count)], np.float32)

    return Vectors(path, read_label_file(labels, count), width, rows)


def _parquet(path: Path) -> Vectors:
    """Return a column of vectors, with a column of labels."""
    from pyarrow import parquet

    texts, lists = [], []
    try:
        file = parquet.ParquetFile(path)
        for field in file.schema_arrow:
            own = getattr(field.type, "value_type", None) if field.type.num_fields == 1 else None
            if field.type in (pa.string(), pa.large_string()):
                texts.append(field.name)
            elif own and (pa.types.is_floating(own) or pa.types.is_integer(own)):
                lists.append(field.name)
        if len(texts) != 1 or len(lists) != 1:
            raise DataError(
                f"{path}: wants one column of labels (strings) and one of vectors (lists of "
                f"numbers), and has {len(texts)} and {len(lists)} among "
                + ", ".join(file.schema_arrow.names)
            )
        labels = file.read(texts)[texts[0]].cast(pa.large_string()).combine_chunks()
        first = next(file.iter_batches(1, columns=lists), None)
    except pa.ArrowException as error:
        raise DataError(f"{path} is no readable Parquet file: {error}") from error
    if labels.null_count:
        raise DataError(f"{path}: {labels.null_count:,} vectors have no label")
    width = len(first[0][0].as_py() or ()) if first is not None and len(first) else 0

    def rows() -> Iterator[np.ndarray]:
        done = 0
        for batch in file.iter_batches(ROWS, columns=lists):
            lengths = pc.fill_null(pc.list_value_length(batch[0]), -1)
            wrong = np.flatnonzero(lengths.to_numpy(zero_copy_only=False) != width)
            if len(wrong):
                place = done + int(wrong[0])
                raise DataError(
                    f"{path}: the vector of {labels[place].as_py()!r} (row {place + 1:,}) has not "
                    f"{width} numbers as the first one"
                )
            done += len(batch)
            numbers = pc.fill_null(pc.list_flatten(batch[0]).cast(pa.float32()), float("nan"))
            yield numbers.to_numpy(zero_copy_only=False).reshape(-1, width)

    return Vectors(path, labels, width, rows)


_READERS: dict[str, Callable[[Path], Vectors]] = {
    ".npy": _matrix,
    ".safetensors": _matrix,
    ".parquet": _parquet,
}
