"""Read vectors of entities: Parquet with a column of strings and one of lists of W numbers.

A folder stands for ``entities.parquet`` in it, as in an export.  Memory holds the labels, and some
thousand vectors at a time.

Shapes: M vectors, W elements each, m of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.errors import DataError

ROWS = 1 << 14  # rows at a time


class Vectors:
    """Labels (M,), and their vectors in the same order.

    Raises:
        DataError: There is no such file, or it has other columns.
    """

    def __init__(self, source: str | Path):
        from pyarrow import parquet  # starts threads

        path = Path(source)
        self.source = path = path / "entities.parquet" if path.is_dir() else path
        if not path.is_file():
            raise DataError(
                f"{path}: no such file of vectors; name a run, an export to Parquet, or a Parquet "
                "file of labels and vectors"
            )
        try:
            self._file = parquet.ParquetFile(path)
            texts, lists = [], []
            for field in self._file.schema_arrow:
                is_list = field.type.num_fields == 1 and hasattr(field.type, "value_type")
                if field.type in (pa.string(), pa.large_string()):
                    texts.append(field.name)
                elif is_list and (
                    pa.types.is_floating(field.type.value_type)
                    or pa.types.is_integer(field.type.value_type)
                ):
                    lists.append(field.name)
            texts = ["label"] if "label" in texts else texts  # an export may have types too
            if len(texts) != 1 or len(lists) != 1:
                raise DataError(
                    f"{path}: wants one column of labels (strings) and one of vectors (lists of "
                    f"numbers), and has {len(texts)} and {len(lists)} among "
                    + ", ".join(self._file.schema_arrow.names)
                )
            self._column = lists
            self.labels = self._file.read(texts)[0].cast(pa.large_string()).combine_chunks()
            first: Any = next(self._file.iter_batches(1, columns=lists), [[]])[0]
        except pa.ArrowException as error:
            raise DataError(f"{path} is no readable Parquet file: {error}") from error
        if self.labels.null_count:
            raise DataError(f"{path}: {self.labels.null_count:,} vectors have no label")
        self.width = len(first[0].as_py() or ()) if len(first) else 0
        if not self.width:
            raise DataError(f"{path} has no vectors; check how it was written")

    def rows(self) -> Iterator[np.ndarray]:
        """Yield all vectors, (m, W) float32.

        Raises:
            DataError: A vector has another width than the first one.
        """
        done = 0
        for batch in self._file.iter_batches(ROWS, columns=self._column):
            lengths = pc.fill_null(pc.list_value_length(batch[0]), -1)
            wrong = np.flatnonzero(lengths.to_numpy(zero_copy_only=False) != self.width)
            if len(wrong):
                raise self._wrong(
                    done + int(wrong[0]), f"has not {self.width} numbers as the first"
                )
            done += len(batch)
            numbers = pc.fill_null(pc.list_flatten(batch[0]).cast(pa.float32()), float("nan"))
            yield numbers.to_numpy(zero_copy_only=False).reshape(-1, self.width)

    def numbers_of(self, labels: pa.Array) -> np.ndarray:
        """Return the number of the vector of each label (N,): (N,) int64, -1 for none.

        Raises:
            DataError: Two vectors have the same label, or no label has one.
        """
        place = pc.index_in(self.labels, value_set=labels)
        ids = pc.fill_null(place, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        there = np.flatnonzero(ids >= 0)
        if not len(there):
            raise nothing_in_common(self.source, self.labels, labels)
        numbers = np.full(len(labels), -1)
        numbers[ids[there]] = there
        again = there[numbers[ids[there]] != there]
        if len(again):
            other = int(numbers[ids[again[0]]])
            raise self._wrong(int(again[0]), f"is there again (number {other + 1:,}); leave one")
        return numbers

    def check_finite(self, first: int, rows: np.ndarray, wanted: np.ndarray) -> None:
        """Raise DataError if one of the wanted rows has NaN or infinity.

        ``first`` is the number of the first of the rows (m, W) among all, and ``wanted`` are places
        among them.
        """
        bad = wanted[~np.isfinite(rows[wanted]).all(1)]
        if len(bad):
            raise self._wrong(first + int(bad[0]), "holds NaN or infinity")

    def _wrong(self, number: int, what: str) -> DataError:
        label = self.labels[number].as_py()
        return DataError(f"{self.source}: the vector of {label!r} (number {number + 1:,}) {what}")


def nothing_in_common(source: Path, labels: pa.Array, entities: pa.Array) -> DataError:
    """Return the error for a source of which no label is an entity of the graph."""
    examples, others = (", ".join(map(repr, x[:3].to_pylist())) for x in (labels, entities))
    return DataError(
        f"{source}: none of its {len(labels):,} labels ({examples}, ...) is an entity of the graph "
        f"({others}, ...)"
    )
