"""How the dense parameters lie on the ranks, in bytes: what ``distributed.dense`` does, planned.

Shapes: P numbers in the dense parameters, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kge_torchrec.config import ConfigError, DenseConfig
from kge_torchrec.embeddings.torchrec.planner import Bytes, dense_state_numbers
from kge_torchrec.planning.devices import Cluster, Ring


@dataclass(frozen=True)
class DenseLayout:
    """Copies of all parameters, each split over some ranks.

    splits: neighbouring ranks that hold a copy together; 1 if every rank holds all.
    is_sharded: fsdp or hybrid, which gather whole parameters to run.
    gathers: how often they do for a forward and backward.
    offload: parts, their gradients and optimizer state lie in main memory.
    """

    splits: int = 1
    is_sharded: bool = False
    gathers: int = 0
    offload: bool = False

    @classmethod
    def of(cls, config: DenseConfig, cluster: Cluster) -> DenseLayout:
        """Raises ConfigError where training would, when the ranks do not allow it."""
        ranks = cluster.world_size
        if config.wrapper == "none" and ranks > 1:
            raise ConfigError(f"dense.wrapper none is of one rank, not of {ranks}; use auto")
        if config.wrapper not in ("fsdp", "hybrid"):
            return cls()
        copies = (config.replicas or cluster.hosts) if config.wrapper == "hybrid" else 1
        if ranks % copies:
            raise ConfigError(
                f"dense.replicas: {ranks} ranks cannot be dealt to {copies} groups of equal size"
            )
        gathers = 2 if config.sharding == "full" else 1
        return cls(ranks // copies, True, gathers, config.cpu_offload)

    def collectives(self, cluster: Cluster) -> int:
        """Of a step, on several ranks: an all-reduce; or gathers, a scatter and a sum of copies."""
        if not self.is_sharded:
            return 1
        copies = cluster.world_size // self.splits
        return self.gathers + (2 if copies > 1 else 1)

    def memory(self, numbers: int, optimizer: str, is_cuda: bool) -> Bytes:
        """A rank's parameters, gradients and optimizer state of P numbers, all float32.

        DDP's buckets are views of the gradients.  FSDP gathers whole parameters; the whole
        gradients that it scatters are among the activations, as backward makes them.
        """
        each = 4 * (2 + dense_state_numbers(optimizer))
        kept = -(-numbers // self.splits) * each
        whole = 4 * numbers if self.is_sharded else 0
        if not is_cuda:
            return Bytes(main=kept + whole)
        return Bytes(device=whole, main=kept) if self.offload else Bytes(device=kept + whole)

    def send(
        self,
        numbers: int,
        cluster: Cluster,
        micro_batches: int,
        within: np.ndarray,
        between: np.ndarray,
    ) -> None:
        """Adds the bytes that each rank sends in a step, (W,), all collectives being rings.

        Parameters are gathered for every micro-batch, gradients travel at the last.
        """
        ranks, copies = np.arange(cluster.world_size), cluster.world_size // self.splits
        passes = self.gathers * micro_batches + 1 if self.is_sharded else 0
        self._send_parts(passes, numbers, cluster, within, between)
        for group in ranks.reshape(copies, self.splits).T:
            Ring(cluster, group).all_reduce(4 * numbers / self.splits, within, between)

    def send_whole(
        self, numbers: int, cluster: Cluster, within: np.ndarray, between: np.ndarray
    ) -> None:
        """The same of a step that gathers parameters once and sums gradients whole."""
        if self.is_sharded:
            self._send_parts(1, numbers, cluster, within, between)
        ring = Ring(cluster, np.arange(cluster.world_size))
        ring.all_reduce(4 * numbers, within, between)

    def _send_parts(
        self,
        passes: int,
        numbers: int,
        cluster: Cluster,
        within: np.ndarray,
        between: np.ndarray,
    ) -> None:
        """Of P numbers all parts to or from all ranks of a copy, so many times."""
        copies = cluster.world_size // self.splits
        size = passes * (self.splits - 1) * 4 * numbers / self.splits
        for group in np.split(np.arange(cluster.world_size), copies):
            Ring(cluster, group).send(size, within, between)
