"""A view of the rows of the entity table on one rank.

Shapes: N entities, D elements per row, n rows on this rank, M ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.data import ENTITY
from kge_torchrec.distributed.processes import world_size

# The table's name in a checkpoint of any backend, after "model." and "optimizer.".
ENTITY_WEIGHT = f"entities.embeddings.{ENTITY}.weight"


@dataclass(frozen=True)
class EntityShard:
    """A view of the rows of the entity table on this rank.  Writes change the table."""

    rows: Tensor  # (n, D); n may be 0 when there are more ranks than entities
    first_row: int  # global id of rows[0]
    num_entities: int  # N, over all ranks
    replicated: bool = False  # this rank holds all rows, even if there are other ranks
    scored_on: torch.device | None = None  # the scorer's device; None: that of the rows
    in_main_memory: bool = False  # the device of the rows is a GPU, which reads them over its link

    @property
    def device(self) -> torch.device:
        """The device that rows are scored on, and ``fetch`` puts them on."""
        return self.rows.device if self.scored_on is None else self.scored_on

    @property
    def ranks(self) -> int:
        """Number of ranks that the rows are split over; all of them take part in ``fetch``."""
        return 1 if self.replicated else world_size()

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    @property
    def row_range(self) -> tuple[int, int]:
        """Global ids [start, stop) of the rows on this rank."""
        return self.first_row, self.first_row + self.rows.shape[0]

    def holds(self, ids: Tensor) -> Tensor:
        """Return (M,) bool: which of the global ids (M,) are on this rank."""
        start, stop = self.row_range
        return (ids >= start) & (ids < stop)

    def own(self, places: Tensor | slice) -> Tensor:
        """Return rows of this rank by their places in ``rows``, on ``device``."""
        if isinstance(places, Tensor):
            places = places.to(self.rows.device)
        own = self.rows[places].to(self.device)
        # A slice is a view. Scoring reads rows several times, and the link is slow.
        return own.clone() if self.in_main_memory and isinstance(places, slice) else own

    @torch.no_grad()
    def fetch(self, ids: Tensor) -> Tensor:
        """Return the rows (M, D) float32 of global ids (M,), on every rank and on ``device``.

        Collective: every rank passes the same ids.

        Raises:
            IndexError: An id is outside [0, N).
        """
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_entities):
            raise IndexError(f"entity ids must lie in [0, {self.num_entities})")
        here = self.holds(ids)
        out = torch.zeros(ids.numel(), self.dim, device=self.device)
        out[here] = self.own(ids[here] - self.first_row).float()
        if self.ranks > 1:
            dist.all_reduce(out)
        return out
