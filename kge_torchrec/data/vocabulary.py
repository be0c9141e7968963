"""Labels and their ids, memory-mapped."""

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data.errors import UnknownLabelError

# Comparing a label with every other one takes too long beyond this many.
MAX_COMPARED = 20_000


class Vocabulary:
    """The labels of ids ``0..len-1``, an Arrow file read in place: opening costs no memory.

    A look-up by label scans the file; it is meant for a user's labels, not for whole data sets.
    """

    def __init__(self, labels: pa.Array, kind: str = "label"):
        self._labels = labels
        self._kind = kind

    @classmethod
    def open(cls, path: Path, kind: str = "label") -> "Vocabulary":
        """``kind`` ("entity", "relation") names the labels in messages."""
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        return cls(table["label"].chunk(0), kind)

    def save(self, path: Path) -> None:
        batch = pa.record_batch([self._labels], ["label"])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def array(self) -> pa.Array:
        """All labels in order of id, a pyarrow array (N,)."""
        return self._labels

    def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Labels of ``ids`` (M,). Raises IndexError for an id outside ``[0, len)``."""
        return self._labels.take(pa.array(np.asarray(ids, np.int64))).to_pylist()

    def ids(self, labels: Sequence[str]) -> np.ndarray:
        """Ids (M,) int64 of ``labels``.

        Raises:
            UnknownLabelError: a label that is not here, with labels that resemble it.
        """
        wanted = pa.array(labels, pa.large_string())
        distinct = wanted.unique()
        slot = pc.index_in(self._labels, value_set=distinct)
        found = np.flatnonzero(slot.is_valid().to_numpy(zero_copy_only=False))
        id_of = np.full(len(distinct), -1, np.int64)
        id_of[slot.take(pa.array(found)).to_numpy(zero_copy_only=False)] = found
        ids = id_of[pc.index_in(wanted, value_set=distinct).to_numpy(zero_copy_only=False)]
        missing = np.flatnonzero(ids < 0)
        if len(missing):
            raise self._unknown(labels[missing[0]], len(missing))
        return ids

    def close_to(self, label: str, count: int = 3) -> list[str]:
        """Labels that resemble ``label``, best first."""
        candidates = self._labels
        if len(candidates) > MAX_COMPARED:
            candidates = candidates.filter(self._resembling(label))[:MAX_COMPARED]
        spelled = {}
        for candidate in candidates.to_pylist():
            spelled.setdefault(candidate.lower(), candidate)
        close = difflib.get_close_matches(label.lower(), list(spelled), count)
        return [spelled[match] for match in close]

    def _resembling(self, label: str) -> pa.Array:
        """A cheap first choice: a similar length, and the same beginning or end."""
        lowered, length = pc.utf8_lower(self._labels), len(label)
        size = pc.utf8_length(self._labels)
        near = pc.and_(
            pc.greater_equal(size, length - 2 - length // 8),
            pc.less_equal(size, length + 2 + length // 8),
        )
        part = max(1, length // 2)
        same = pc.or_(
            pc.starts_with(lowered, label.lower()[:part]),
            pc.ends_with(lowered, label.lower()[-part:]),
        )
        return pc.and_(near, same)

    def _unknown(self, label: str, missing: int) -> UnknownLabelError:
        close = self.close_to(label)
        hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
        others = f" (and {missing - 1} more labels)" if missing > 1 else ""
        return UnknownLabelError(f"unknown {self._kind} {label!r}{others}{hint}")
