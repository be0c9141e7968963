"""A random graph without files, and as a store, for benchmarks and checks of large tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.config import Config
from kge_torchrec.config.sizing import GraphSize
from kge_torchrec.data.store.contents import finish_store
from kge_torchrec.data.store.writing import new_store, save_triples


@dataclass
class RandomGraph:
    """The parts of a store that training needs; ``train`` has (T, 3) int32 random triples."""

    num_entities: int
    num_relations: int
    num_triples: int = 0
    train: np.ndarray | None = None
    base: None = None  # not extended
    has_features: bool = False

    def __post_init__(self) -> None:
        if self.train is None:
            stream = np.random.default_rng(0)
            self.train = np.empty((self.num_triples, 3), np.int32)
            for column, count in enumerate(
                (self.num_entities, self.num_relations, self.num_entities)
            ):
                self.train[:, column] = stream.integers(
                    count, size=self.num_triples, dtype=np.int32
                )

    @property
    def num_rows(self) -> int:
        """Rows of the table: one per entity."""
        return self.num_entities

    def weights(self, split: str) -> None:
        """Return None: the triples have no weights."""

    def features(self) -> None:
        """Return None: the entities have no features."""

    def settled(self, config: Config) -> Config:
        """Return the config with values for the keys that depend on the graph's size.

        Set these keys yourself if graphs of different sizes are compared.
        """
        assert self.train is not None
        return config.settled(GraphSize(self.num_entities, self.num_relations, len(self.train)))

    def write(self, folder: Path, test: int = 0) -> None:
        """Write a store with the labels e0, e1, ... and r0, r1, ...; the last triples are test."""
        assert self.train is not None
        train, held_out = np.split(self.train, [len(self.train) - test])
        splits = {"train": train, "valid": train[:0], "test": held_out}
        entities, relations = numbered("e", self.num_entities), numbered("r", self.num_relations)
        with new_store(folder, overwrite=True) as made:
            save_triples(made, splits, {})
            finish_store(made, entities, relations, {})


def numbered(letter: str, count: int) -> pa.Array:
    """Return the labels e0, e1, ... of a letter."""
    first, none = (pa.scalar(text, pa.large_string()) for text in (letter, ""))
    numbers = pc.cast(pa.array(np.arange(count)), pa.large_string())
    return pc.binary_join_element_wise(first, numbers, none)
