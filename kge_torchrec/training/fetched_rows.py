"""Rows that every rank needs for a moment, and their gradients on the way home.

Shapes: F rows, repeats included, A distinct ones that live on this rank, m rows of a block, D
numbers a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.data.queries import Asked
from kge_torchrec.entities.contract import EntityShard
from kge_torchrec.entities.row_gradients import RowGradients
from kge_torchrec.training.directions import to_device


class FetchedRows:
    """Rows of the queries' anchors, and of their answers if asked for.  Collective.

    with_answers: every query has exactly one.

    Attributes:
        rows: (F, D) float32, on every rank the same; a leaf to differentiate by.
        anchors: (queries, D) of it for each direction.
        answers: the same of the answers, nothing without them.
    """

    def __init__(self, asked: Sequence[Asked], shard: EntityShard, with_answers: bool):
        self.device, (start, stop) = shard.rows.device, shard.row_range
        ids = [part.anchor for part in asked]
        ids += [part.answers.all()[1] for part in asked] if with_answers else []
        every = np.concatenate(ids)
        position = np.flatnonzero((every >= start) & (every < stop))
        # Rows of this shard whose gradient is not complete before all blocks are done.
        self._held, inverse = np.unique(every[position] - start, return_inverse=True)
        arrays = self._held, position, inverse
        self._rows_held, self._position, self._inverse = (to_device(x, self.device) for x in arrays)
        self._gradients = torch.zeros(len(self._held), shard.dim, device=self.device)
        self.rows = self._fetch(shard, len(every)).requires_grad_()
        with torch.enable_grad():
            parts = self.rows.split([len(part) for part in ids])
        self.anchors = parts[: len(asked)]
        self.answers = parts[len(asked) :] or [None] * len(asked)

    def _fetch(self, shard: EntityShard, count: int) -> Tensor:
        out = torch.zeros(count, shard.dim, device=self.device)
        own = shard.rows.detach().index_select(0, self._rows_held).float()
        out.index_copy_(0, self._position, own.index_select(0, self._inverse))
        return _summed(out)

    def hold_back(self, block: range, grad: Tensor) -> RowGradients:
        """Gradients (m, D) of a block's rows without those of fetched rows, which are kept."""
        low, high = np.searchsorted(self._held, (block.start, block.stop))
        held = self._rows_held[low:high] - block.start
        rows = _all_but(held, len(block))
        if low < high:
            self._gradients[low:high] = grad.index_select(0, held)
            grad = grad.index_select(0, rows)
        return RowGradients(rows + block.start, grad, None, True)

    def add(self, grad: Tensor) -> None:
        """Adds gradients (F, D) of ``rows``, which are this rank's part.  Collective."""
        own = _summed(grad).index_select(0, self._position)
        self._gradients.index_add_(0, self._inverse, own)

    def gradients(self) -> RowGradients:
        """Of the fetched rows that live here."""
        return RowGradients(self._rows_held, self._gradients, None, True)


def _all_but(held: Tensor, count: int) -> Tensor:
    """The places 0 to count - 1 without some, both ascending; nothing waits for the device."""
    kept = torch.arange(count - len(held), device=held.device)
    # Before held[k] there are held[k] - k places that are kept.
    before = held - torch.arange(len(held), device=held.device)
    return kept + torch.searchsorted(before, kept, right=True)


def _summed(x: Tensor) -> Tensor:
    """Over all ranks, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x)
    return x
