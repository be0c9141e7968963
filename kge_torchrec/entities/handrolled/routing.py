"""Which rank owns which row, and the way of a batch's ids to their owners.

Shapes: N rows, W ranks, M ids of this rank's batch, R ids that this rank is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.streamable import Pipelineable


@dataclass(frozen=True)
class RowRanges:
    """N rows dealt to W ranks in runs whose lengths differ by at most one; N < W leaves some empty.

    Raises ValueError for less than one row or rank.
    """

    num_rows: int
    world_size: int

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.world_size < 1:
            raise ValueError(f"{self.num_rows} rows on {self.world_size} ranks")

    def range_of(self, rank: int) -> tuple[int, int]:
        """Rows [start, stop) of a rank."""
        start, stop = (self.num_rows * r // self.world_size for r in (rank, rank + 1))
        return start, stop

    def starts(self) -> Tensor:
        """(W,) first row of each rank; empty ranks start where the next one does."""
        return torch.tensor([self.range_of(rank)[0] for rank in range(self.world_size)])

    def owners(self, ids: Tensor) -> Tensor:
        """(M,) rank of each id in [0, N)."""
        # A start that several ranks share belongs to the last of them: the others are empty.
        return torch.bucketize(ids, self.starts().to(ids.device), right=True) - 1


@dataclass
class Route(Pipelineable):
    """A batch's ids on their way: grouped by owner, with the counts that both ends know.

    It is made on the host before the batch moves to its device, so no exchange of a step waits for
    the device to tell a count.
    """

    ids: Tensor  # (M,) grouped by owner
    occurrences: Tensor  # (M,) places of the batch that each id stands for; empty: not needed
    order: Tensor  # (M,) place in the batch of each grouped id; empty: the same order
    send: list[int]  # (W,) ids for each rank
    receive: list[int]  # (W,) ids from each rank; they sum to R
    distinct: bool  # no id occurs twice in ``ids``

    def _map(self, change) -> Route:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {k: change(v) for k, v in tensors.items() if isinstance(v, Tensor)}
        return replace(self, **changed)

    def to(self, device: torch.device, non_blocking: bool = False) -> Route:
        return self._map(lambda x: x.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Route:
        return self._map(lambda x: x.pin_memory())

    def record_stream(self, stream: Any) -> None:
        for tensor in (self.ids, self.occurrences, self.order):
            tensor.record_stream(stream)


_NOTHING = torch.empty(0, dtype=torch.int64)


def make_route(
    ids: Tensor,
    ranges: RowRanges,
    group: dist.ProcessGroup | None,
    *,
    ascending: bool,
    occurrences: Tensor | None = None,
) -> Route:
    """The route of ids (M,) on the CPU; M may be 0.  Collective when there are several ranks.

    ascending: the ids are strictly increasing, so they are grouped by owner as they are.
    """
    order = _NOTHING
    if ranges.world_size == 1:
        counts = [ids.numel()]
        return Route(ids, _or_nothing(occurrences), order, counts, counts, ascending)
    if ascending:
        below = torch.searchsorted(ids, ranges.starts())
        counts = torch.diff(below, append=torch.tensor([ids.numel()]))
    else:
        owners = ranges.owners(ids)
        order = torch.argsort(owners, stable=True)
        counts = torch.bincount(owners, minlength=ranges.world_size)
        ids = ids[order]
        occurrences = None if occurrences is None else occurrences[order]
    asked = torch.empty_like(counts)
    dist.all_to_all_single(asked, counts, group=group)
    return Route(ids, _or_nothing(occurrences), order, counts.tolist(), asked.tolist(), ascending)


def _or_nothing(occurrences: Tensor | None) -> Tensor:
    return _NOTHING if occurrences is None else occurrences
