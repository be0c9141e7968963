"""Give ids their labels, by files such as entity2id.txt or entities.dict.

OpenKE, LibKGE, DGL-KE and others write triples of numbers, and files of numbers and labels beside
them.  Numbers may have gaps.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.errors import DataError


class LabelFile:
    """The labels of ids.

    Args:
        path: The file.
        ids: Its ids (N,).
        labels: Their labels (N,).
        is_named: Whether a key names the file; otherwise the first ids say whether it is used.
        notes: Takes whether a file that no key names is used.

    Raises:
        DataError: An id or a label is there twice.
    """

    def __init__(
        self,
        path: Path,
        ids: pa.Array,
        labels: pa.Array,
        is_named: bool,
        notes: list[tuple[str, str]],
    ):
        self.path, self._ids, self._labels, self._notes = path, ids, labels, notes
        self._used: bool | None = is_named or None
        for column, what in ((ids, "id"), (labels, "label")):
            if len(pc.unique(column)) < len(column):
                counts = pc.value_counts(column)
                twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
                raise DataError(f"{path}: the {what} {twice[0].as_py()!r} is there twice")

    def labels_of(self, ids: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the labels of ids (B,), and which of them are unknown."""
        known = pc.index_in(ids, value_set=self._ids)
        if self._used is None:
            self._decide(ids, known)
        if not self._used:
            return ids, pa.array([], pa.bool_())
        return self._labels.take(known), known.is_null()

    def _decide(self, ids: pa.Array, known: pa.Array) -> None:
        """Decide by the first ids whether they are ids of this file, labels of it, or neither."""
        are_labels = pc.all(pc.is_in(ids, value_set=self._labels)).as_py()
        if are_labels and not known.null_count:
            raise DataError(
                f"{self.path}: the triples may hold its ids or its labels; data.labels names the "
                "file if they are ids, and has none instead if they are labels"
            )
        self._used = not are_labels and known.null_count * 2 <= len(ids)
        said = "its labels take the place of ids; data.labels sets other files or none"
        if not self._used:
            what = "its labels" if are_labels else "few of its ids"
            said = f"not used: the triples have {what}; data.labels names files that are"
        self._notes.append((str(self.path), said))
