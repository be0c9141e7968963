"""A random graph without files, for benchmarks and checks of large tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kge_torchrec.config import Config
from kge_torchrec.config.sizing import GraphSize


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
