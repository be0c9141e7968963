"""A graph without files, for benchmarks and checks of tables that no graph at hand would fill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kge_torchrec.config import Config
from kge_torchrec.config.sizing import GraphSize


@dataclass
class RandomGraph:
    """What training asks of a store; train: (T, 3) int32 triples, uniform unless they are given."""

    num_entities: int
    num_relations: int
    num_triples: int = 0
    train: np.ndarray | None = None
    base: None = None  # it was not extended

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

    def weights(self, split: str) -> None:
        """No triple has one."""

    def settled(self, config: Config) -> Config:
        """The config with a number for what is left to the size of the graph.

        What is to be the same work on graphs of any size has to be given.
        """
        assert self.train is not None
        return config.settled(GraphSize(self.num_entities, self.num_relations, len(self.train)))
