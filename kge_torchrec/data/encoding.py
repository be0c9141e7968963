"""Labels become integer ids, in bounded memory and without a Python object per label.

Each batch is dictionary-encoded on its own, several at a time; the small dictionaries of the
batches are then themselves dictionary-encoded, which gives the map from batch ids to final ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kge_torchrec.data.prefetch import map_prefetched
from kge_torchrec.data.streams import WEIGHT

# Dictionaries of batches are merged when they hold this much, so that they never hold all text.
MERGE_BYTES = 1 << 30


class Encoded(NamedTuple):
    """Triples as numbers."""

    entities: pa.Array  # (N,) labels
    relations: pa.Array  # (R,) labels
    triples: dict[str, np.ndarray]  # per split (T, 3) int32
    weights: dict[str, list[np.ndarray | None]]  # per split, of each batch (T,) float32 or None


def encode(
    batches: Iterable[tuple[str, pa.RecordBatch]],
    known_entities: pa.Array | None = None,
    known_relations: pa.Array | None = None,
) -> Encoded:
    """Numbers labels by their first appearance, batch by batch.

    Args:
        batches: (split, batch of the large_string columns head, relation, tail; and float32 weight
            where there is one).
        known_entities, known_relations: labels that have the first ids, in this order.
    """
    entities, relations = Labels(known_entities), Labels(known_relations)
    blocks: dict[str, list[np.ndarray]] = defaultdict(list)
    weights: dict[str, list[np.ndarray | None]] = defaultdict(list)
    filled = (item for item in batches if item[1].num_rows)
    for split, new_entities, new_relations, codes, own in map_prefetched(_encode_batch, filled):
        entities.add(new_entities, codes[:, 0::2])
        relations.add(new_relations, codes[:, 1:2])
        blocks[split].append(codes)
        weights[split].append(own)
    entities.merge()
    relations.merge()
    # One split at a time, so that only one is held twice.
    triples = {split: np.concatenate(blocks.pop(split)) for split in list(blocks)}
    return Encoded(entities.values, relations.values, triples, weights)


class Labels:
    """One vocabulary in the making.  known: distinct labels that come first."""

    def __init__(self, known: pa.Array | None = None) -> None:
        self.values = pa.array([], pa.large_string()) if known is None else known
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


def _encode_batch(
    item: tuple[str, pa.RecordBatch],
) -> tuple[str, pa.Array, pa.Array, np.ndarray, np.ndarray | None]:
    """Split, labels of the entities and relations of a batch, its triples as codes, weights."""
    split, batch = item
    ends = pa.chunked_array([batch["head"], batch["tail"]]).dictionary_encode()
    relations = batch["relation"].dictionary_encode()
    codes = np.empty((batch.num_rows, 3), np.int32)
    codes[:, 0] = ends.chunk(0).indices
    codes[:, 1] = relations.indices
    codes[:, 2] = ends.chunk(1).indices
    weights = batch[WEIGHT].to_numpy() if WEIGHT in batch.schema.names else None
    return split, ends.chunk(0).dictionary, relations.dictionary, codes, weights
