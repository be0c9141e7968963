"""Collectives as rings: each rank sends to the next one, on its host or not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kge_torchrec.planning.devices import Cluster


@dataclass(frozen=True)
class Ring:
    """Some ranks of a cluster, in their order."""

    cluster: Cluster
    ranks: np.ndarray

    def send(self, size: float, within: np.ndarray, between: np.ndarray) -> None:
        """Adds ``size`` bytes, sent by every rank to the next, to (W,) bytes sent by each rank."""
        if len(self.ranks) < 2:
            return
        hosts = self.ranks // self.cluster.local_world_size
        leaves = hosts != np.roll(hosts, -1)
        within[self.ranks] += np.where(leaves, 0, size)
        between[self.ranks] += np.where(leaves, size, 0)

    def all_reduce(self, size: float, within: np.ndarray, between: np.ndarray) -> None:
        """The same for an all-reduce of ``size`` bytes: each rank sends 2 (n - 1) / n of them."""
        count = len(self.ranks)
        self.send(2 * (count - 1) / count * size, within, between)
