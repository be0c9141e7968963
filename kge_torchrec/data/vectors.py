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
        path = _in_folder(path)
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


def ids_of(vectors: Vectors, labels: pa.Array) -> np.ndarray:
    """Return the places of the vectors' labels in ``labels`` (N,): (M,) int64, -1 for none.

    Raises:
        DataError: Two vectors have the same label, or no label is in ``labels``.
    """
    place = pc.index_in(vectors.labels, value_set=labels)
    ids = pc.fill_null(place, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    there = ids[ids >= 0]
    if not len(there):
        examples = ", ".join(map(repr, vectors.labels[:3].to_pylist()))
        others = ", ".join(map(repr, labels[:3].to_pylist()))
        raise DataError(
            f"{vectors.source}: none of its {len(ids):,} labels ({examples}, ...) is an entity of "
            f"the graph ({others}, ...)"
        )
    counts = np.bincount(there, minlength=len(labels))
    if counts.max() > 1:
        label = labels[int(counts.argmax())].as_py()
        places = (np.flatnonzero(ids == counts.argmax())[:2] + 1).tolist()
        raise DataError(
            f"{vectors.source}: {label!r} has {counts.max()} vectors (number {places[0]:,} and "
            f"{places[1]:,}); leave one of them"
        )
    return ids


def check_finite(vectors: Vectors, first: int, rows: np.ndarray, wanted: np.ndarray) -> None:
    """Raise DataError, with the label, for a wanted row (m,) bool that has NaN or infinity.

    ``first`` is the number of the first of the rows (m, W) among all.
    """
    bad = np.flatnonzero(~np.isfinite(rows).all(1) & wanted)
    if len(bad):
        place = first + int(bad[0])
        raise DataError(
            f"{vectors.source}: the vector of {vectors.labels[place].as_py()!r} (number "
            f"{place + 1:,}) holds NaN or infinity"
        )


def _in_folder(folder: Path) -> Path:
    """Return the file of vectors in a folder."""
    names = [folder / f"entities{suffix}" for suffix in _READERS]
    files_there = [name for name in names if name.is_file()]
    if len(files_there) != 1:
        what = "none" if not files_there else f"{len(files_there)} of them"
        raise DataError(
            f"{folder}: looked for a run, an export or one of "
            f"{', '.join(name.name for name in names)}, and there is {what}"
        )
    return files_there[0]


def _matrix(path: Path, table: Any, shape: tuple[int, ...], is_real: bool) -> Vectors:
    """Return the rows of a table (M, W) that is sliced like an array, with labels beside it."""
    if len(shape) != 2 or not is_real:
        raise DataError(f"{path}: vectors are real numbers of shape (M, W), this has {shape}")
    count, width = shape
    labels = path.with_suffix(".txt")
    if not labels.is_file():
        raise DataError(f"{path}: its labels should be in {labels.name} beside it, one a line")

    def rows() -> Iterator[np.ndarray]:
        for first in range(0, count, ROWS):
            yield np.asarray(table[first : min(first + ROWS, count)], np.float32)

    return Vectors(path, read_label_file(labels, count, foreign=True), width, rows)


def _npy(path: Path) -> Vectors:
    try:
        table = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is no readable .npy file: {error}") from error
    return _matrix(path, table, table.shape, table.dtype.kind in "fiu")


def _safetensors(path: Path) -> Vectors:
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(path, "numpy")
        names = list(opened.keys())
        if len(names) != 1:
            raise DataError(f"{path} has {len(names)} tensors; save one tensor with all vectors")
        tensor = opened.get_slice(names[0])
    except SafetensorError as error:
        raise DataError(f"{path} is no readable safetensors file: {error}") from error
    is_real = tensor.get_dtype() in ("F16", "F32", "F64")
    return _matrix(path, tensor, tuple(tensor.get_shape()), is_real)


def _parquet(path: Path) -> Vectors:
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        fields = {field.name: field.type for field in file.schema_arrow}
        texts = [
            n for n, t in fields.items() if pa.types.is_string(t) or pa.types.is_large_string(t)
        ]
        lists = [n for n, t in fields.items() if _is_list(t)]
        if len(texts) != 1 or len(lists) != 1:
            raise DataError(
                f"{path}: wants one column of labels (strings) and one of vectors (lists of "
                f"numbers), and has {len(texts)} and {len(lists)} among {', '.join(fields)}"
            )
        labels = file.read([texts[0]])[texts[0]].cast(pa.large_string()).combine_chunks()
        first = next(file.iter_batches(1, columns=lists), None)
    except pa.ArrowException as error:
        raise DataError(f"{path} is no readable Parquet file: {error}") from error
    if labels.null_count:
        raise DataError(f"{path}: {labels.null_count:,} vectors have no label")
    width = len(first[0][0].as_py() or ()) if first is not None and len(first) else 0

    def rows() -> Iterator[np.ndarray]:
        done = 0
        for batch in file.iter_batches(ROWS, columns=lists):
            lengths = pc.fill_null(pc.list_value_length(batch[0]), -1).to_numpy(
                zero_copy_only=False
            )
            if (lengths != width).any():
                place = done + int(np.flatnonzero(lengths != width)[0])
                raise DataError(
                    f"{path}: the vector of {labels[place].as_py()!r} (row {place + 1:,}) has not "
                    f"{width} numbers as the first one"
                )
            numbers = pc.list_flatten(batch[0]).cast(pa.float32())
            done += len(batch)
            values = pc.fill_null(numbers, float("nan")).to_numpy(zero_copy_only=False)
            yield values.reshape(-1, width)

    return Vectors(path, labels, width, rows)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ) and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))


_READERS: dict[str, Callable[[Path], Vectors]] = {
    ".npy": _npy,
    ".safetensors": _safetensors,
    ".parquet": _parquet,
}
