"""The rows of the entity table that a rank holds, whoever keeps them.

Shapes: N entities, D numbers per entity, n rows on this rank, M ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.data import ENTITY

# What every engine calls the table in a checkpoint, and the first part of its states' names.
ENTITY_WEIGHT = f"entities.embeddings.{ENTITY}.weight"


@dataclass(frozen=True)
class EntityShard:
    """The rows of the entity table that this rank holds, as a view: writes reach the table."""

    rows: Tensor  # (n, D); n may be 0 when there are more ranks than entities
    first_row: int  # global id of rows[0]
    num_entities: int  # N, over all ranks

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    @property
    def row_range(self) -> tuple[int, int]:
        """Global ids [start, stop) held here."""
        return self.first_row, self.first_row + self.rows.shape[0]

    def holds(self, ids: Tensor) -> Tensor:
        """(M,) bool: which of the global ids live here."""
        start, stop = self.row_range
        return (ids >= start) & (ids < stop)

    @torch.no_grad()
    def fetch(self, ids: Tensor) -> Tensor:
        """Rows of the global ids (M,), as (M, D) float32 on every rank.

        Collective: every rank passes the same ids.  Raises IndexError on an id outside [0, N).
        """
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_entities):
            raise IndexError(f"entity ids must lie in [0, {self.num_entities})")
        here = self.holds(ids)
        out = torch.zeros(ids.numel(), self.dim, device=self.rows.device)
        out[here] = self.rows[ids[here] - self.first_row].float()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(out)
        return out
