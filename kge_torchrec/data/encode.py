"""From batches of labels to integer ids, in bounded memory and without a Python object per label.

Each batch is dictionary-encoded on its own, several at a time; the small dictionaries of the
batches are then themselves dictionary-encoded, which gives the map from batch ids to final ids.
"""

import os
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa

# Dictionaries of batches are merged when they hold this much, so that they never hold all text.
MERGE_BYTES = 1 << 30


class TripleEncoder:
    """Collects batches of labels and numbers the labels by first appearance, batch by batch.

    Use as a context manager: ``add`` every batch, then ``finish`` once.
    """

    def __init__(self):
        self._workers = max(1, min(4, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(self._workers)
        self._running: deque[tuple[str, Future]] = deque()
        self._entities, self._relations = _Labels(), _Labels()
        self._codes: dict[str, list[np.ndarray]] = defaultdict(list)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown(cancel_futures=True)

    def add(self, split: str, batch: pa.RecordBatch) -> None:
        """Takes over a batch of the string columns head, relation, tail."""
        self._running.append((split, self._pool.submit(_encode, batch)))
        while len(self._running) > self._workers:
            self._collect()

    def finish(self) -> tuple[pa.Array, pa.Array, dict[str, np.ndarray]]:
        """Entity labels (N,), relation labels (R,), and per split the ids (T, 3) int32."""
        while self._running:
            self._collect()
        self._entities.merge()
        self._relations.merge()
        triples = {}
        for split in list(self._codes):
            triples[split] = np.concatenate(self._codes.pop(split))
        return self._entities.values, self._relations.values, triples

    def _collect(self) -> None:
        split, encoded = self._running.popleft()
        entities, relations, codes = encoded.result()
        self._entities.add(entities, codes[:, 0::2])
        self._relations.add(relations, codes[:, 1:2])
        self._codes[split].append(codes)


class _Labels:
    """One vocabulary in the making."""

    def __init__(self):
        self.values = pa.array([], pa.large_string())
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


def _encode(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array, np.ndarray]:
    """Labels of the entities and relations of a batch, and its triples as codes (T, 3)."""
    ends = pa.chunked_array([batch["head"], batch["tail"]]).dictionary_encode()
    relations = batch["relation"].dictionary_encode()
    codes = np.empty((batch.num_rows, 3), np.int32)
    codes[:, 0] = ends.chunk(0).indices
    codes[:, 1] = relations.indices
    codes[:, 2] = ends.chunk(1).indices
    return ends.chunk(0).dictionary, relations.dictionary, codes
