"""SimplE (Kazemi and Poole 2018): score = (<h_head, r, t_tail> + <t_head, r', h_tail>) / 2."""

from __future__ import annotations

import torch
from torch import Tensor

from kge_torchrec.models.scorers.base import Side, TrilinearScorer


class SimplE(TrilinearScorer):
    """An entity's row is its vector as a head, then its vector as a tail, D/2 numbers each.

    A relation's row is the vector r, then r' of its inverse, D/2 numbers each.  <x, y, z> is
    sum_k x_k y_k z_k.  Raises ValueError when D is odd.
    """

    name = "simple"

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        (as_head, as_tail), (forth, back) = anchor.chunk(2, -1), relation.chunk(2, -1)
        if side == "tail":
            parts = as_tail * back, as_head * forth
        else:
            parts = as_tail * forth, as_head * back
        return torch.cat(parts, -1) / 2

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        (head_head, head_tail), (tail_head, tail_tail) = head.chunk(2, -1), tail.chunk(2, -1)
        return torch.cat([head_head * tail_tail, tail_head * head_tail], -1) / 2
