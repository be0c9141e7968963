"""Labels: which texts may be one, files of them, and ids for them.

Shapes: N labels, T triples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import TIME, WEIGHT
from kge_torchrec.data.streams import map_prefetched
from kge_torchrec.errors import DataError

LONGEST = 1 << 16  # bytes of a label; a longer one is a damaged file rather than a name


def fault_of(label: str) -> str | None:
    """Return why a text cannot be a label, as a clause; None if it can."""
    if not label:
        return "is empty"
    if label.isspace():
        return f"is white space alone, {label[:20]!r}; name it, or take its triple out"
    if "\0" in label:
        return f"holds a NUL byte: {label[:40]!r}; is the file damaged, or UTF-16?"
    size = len(label.encode())
    if size > LONGEST:
        return (
            f"has {size:,} bytes, and a label at most {LONGEST:,}: {label[:40]!r}...; is a line "
            "end or a delimiter missing?"
        )
    return None


class LabelFault(NamedTuple):
    """A text that cannot be a label: its row, and why, as a clause."""

    row: int
    reason: str


def first_fault(labels: pa.Array) -> LabelFault | None:
    """Return the first of some texts that cannot be a label, or None.

    Takes a few nanoseconds per label where all are good.

    Args:
        labels: (N,) large_string; null counts as empty.
    """
    lengths = pc.min_max(pc.binary_length(labels)).as_py()
    if not len(labels):
        return None
    if (
        not labels.null_count
        and lengths["min"] > 0
        and lengths["max"] <= LONGEST
        and text_of(labels)[1].all()
        and not pc.any(pc.utf8_is_space(labels)).as_py()
    ):
        return None
    reasons = ((row, fault_of(label.as_py() or "")) for row, label in enumerate(labels))
    return next(LabelFault(row, reason) for row, reason in reasons if reason is not None)


def check_labels(entities: pa.Array, relations: pa.Array) -> None:
    """Raise DataError for a text that cannot be a label."""
    for kind, labels in (("an entity", entities), ("a relation", relations)):
        if fault := first_fault(labels):
            raise DataError(f"the label of {kind} {fault.reason}")


def text_of(labels: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return where each label starts and the last one ends, (N + 1,), and the bytes of all."""
    _, offsets, text = labels.buffers()
    starts = np.frombuffer(offsets, np.int64)[labels.offset : labels.offset + len(labels) + 1]
    codes = np.frombuffer(text or b"", np.uint8)
    return starts - starts[0], codes[starts[0] : starts[-1]]


# Files of labels: one a line, in order of id, UTF-8.  A backslash, a newline and a carriage return
# inside a label are escaped, so that a line is always a label.
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}  # the backslash first
_PLAIN = {written: plain for plain, written in ESCAPES.items()}
_NEWLINE = 10


def read_label_file(file: Path, count: int, foreign: bool = False) -> pa.Array:
    """Return the labels (count,) of a file, in memory, without a Python object for each.

    Args:
        file: One label per line.
        count: The expected number of lines.
        foreign: Whether another program wrote the file: it may leave out the last newline or end
            lines as Windows does.

    Raises:
        DataError: The file is not such a text, or has another number of lines.
    """
    data = np.fromfile(file, np.uint8)
    if foreign and data.size and data[-1] != _NEWLINE:
        data = np.append(data, np.uint8(_NEWLINE))
    ends = np.flatnonzero(data == _NEWLINE) + 1
    if len(ends) != count or data.size != (ends[-1] if count else 0):
        raise DataError(
            f"{file} should hold {count:,} lines, one label each, and has {len(ends):,}"
        )
    offsets = np.concatenate([[0], ends])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    lines = pa.Array.from_buffers(pa.large_string(), count, buffers)
    try:
        lines.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} is not valid UTF-8 ({error}); save it as UTF-8") from error
    pattern = r"\r?\n" if foreign else "\n"
    return _unescaped(pc.replace_substring_regex(lines, pattern, ""))


def _unescaped(labels: pa.Array) -> pa.Array:
    """Return labels without escapes."""
    escaped = pc.match_substring(labels, "\\")
    plain = [
        re.sub(r"\\[\\nr]", lambda match: _PLAIN[match[0]], label)
        for label in labels.filter(escaped).to_pylist()
    ]
    return pc.replace_with_mask(labels, escaped, pa.array(plain, labels.type)) if plain else labels


# The dictionaries of batches are merged at this size, so that they never hold all text.
MERGE_BYTES = 1 << 30


class Encoded(NamedTuple):
    """Triples of ids.

    Args:
        entities, relations: Labels in order of id.
        triples: (T, 3) int32, by split.
        weights: By split, those of each batch, (T,) float32 or None.
        times: The same for times, (T,) int64, float64 or timestamp.
    """

    entities: pa.Array
    relations: pa.Array
    triples: dict[str, np.ndarray]
    weights: dict[str, list[np.ndarray | None]]
    times: dict[str, list[pa.Array | None]]


def encode(
    batches: Iterable[tuple[str, pa.RecordBatch]],
    known_entities: pa.Array | None = None,
    known_relations: pa.Array | None = None,
) -> Encoded:
    """Give labels ids by their first appearance, batch by batch.

    Memory is bounded but for the ids, and there is no Python object per label.  Each batch is
    dictionary-encoded on its own, several at a time.  The small dictionaries of the batches are
    then dictionary-encoded themselves, which gives the map from ids of a batch to final ids.

    Args:
        batches: Split, and a batch of the large_string columns head, relation, tail, and of
            weight and time where there are some.
        known_entities: Labels of entities that have the first ids, in this order.
        known_relations: Labels of relations that have the first ids, in this order.
    """
    entities, relations = Labels(known_entities), Labels(known_relations)
    blocks: dict[str, list[np.ndarray]] = defaultdict(list)
    weights: dict[str, list[np.ndarray | None]] = defaultdict(list)
    times: dict[str, list[pa.Array | None]] = defaultdict(list)
    filled = (item for item in batches if item[1].num_rows)
    for split, new_entities, new_relations, codes, own, when in map_prefetched(
        encode_batch, filled
    ):
        entities.add(new_entities, codes[:, 0::2])
        relations.add(new_relations, codes[:, 1:2])
        blocks[split].append(codes)
        weights[split].append(own)
        times[split].append(when)
    entities.merge()
    relations.merge()
    # One split at a time, so that only one is held twice.
    triples = {split: np.concatenate(blocks.pop(split)) for split in list(blocks)}
    return Encoded(entities.values, relations.values, triples, weights, times)


class Labels:
    """A vocabulary in the making.

    Args:
        known: Distinct labels that come first.
    """

    def __init__(self, known: pa.Array | None = None) -> None:
        self.values = pa.array([], pa.large_string()) if known is None else known
        self._pending: list[tuple[pa.Array, np.ndarray]] = []

    def add(self, labels: pa.Array, codes: np.ndarray) -> None:
        """Add the labels of a batch and the codes into them, which ``merge`` will overwrite."""
        self._pending.append((labels, codes))
        # To wait for as much as there is already keeps the repeated merging linear.
        waiting = sum(pending.nbytes for pending, _ in self._pending)
        if waiting > max(MERGE_BYTES, self.values.nbytes):
            self.merge()

    def merge(self) -> None:
        """Give the labels that are waiting their final ids."""
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


def encode_batch(
    item: tuple[str, pa.RecordBatch],
) -> tuple[str, pa.Array, pa.Array, np.ndarray, np.ndarray | None, pa.Array | None]:
    """Return split, labels of entities and relations, codes, weights and times of a batch."""
    split, batch = item
    ends = pa.chunked_array([batch["head"], batch["tail"]]).dictionary_encode()
    relations = batch["relation"].dictionary_encode()
    codes = np.empty((batch.num_rows, 3), np.int32)
    codes[:, 0] = ends.chunk(0).indices
    codes[:, 1] = relations.indices
    codes[:, 2] = ends.chunk(1).indices
    weights = batch[WEIGHT].to_numpy() if WEIGHT in batch.schema.names else None
    times = batch[TIME] if TIME in batch.schema.names else None
    return split, ends.chunk(0).dictionary, relations.dictionary, codes, weights, times
