"""CoKE (Wang et al. 2019): score(h, r, t) = <z, t>, z a transformer's state of the masked t."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.models.scorers.base import DotScorer, Fill, Side

_POSITIONS = {"head": 0, "tail": 2}  # of the mask


class CoKE(DotScorer):
    """Entity, relation and mask, each with its position, go through a transformer encoder.

    D numbers a row.  The last state of the mask, through a layer of its own, is compared with the
    entities' rows.  (?, r, t) is asked as [MASK], r, t: without reciprocal relations a triple has
    another score on either side, as in the paper.  The authors' code adds a bias of each entity,
    which the paper's formula lacks: left out.

    layers, heads, feed_forward_dim: of the encoder; the width None takes 2 D.  hidden_dropout is
    also the encoder's.  Raises ValueError when the heads cannot share D.
    """

    name = "coke"

    def __init__(
        self,
        num_relations: int,
        dim: int,
        reciprocal: bool = False,
        *,
        layers: int = 6,
        heads: int = 4,
        feed_forward_dim: int | None = None,
        **shared: Any,
    ):
        options = {"layers": layers, "heads": heads, "feed_forward_dim": feed_forward_dim}
        super().__init__(num_relations, dim, reciprocal, options=options, **shared)
        dropout = self.hidden_dropout.p
        self.mask = nn.Parameter(torch.empty(1, dim))
        self.positions = nn.Parameter(torch.empty(3, dim))
        self.input_norm = nn.LayerNorm(dim)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(
                dim, heads, feed_forward_dim or 2 * dim, dropout, "gelu", batch_first=True
            ),
            layers,
            enable_nested_tensor=False,
        )
        self.output = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Relations, mask and positions take the configured draw, layers torch's."""
        super().reset_parameters(fill, stream)
        for rows in (self.mask, self.positions):
            fill(stream, rows.numpy())

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        anchor, relation, mask = torch.broadcast_tensors(anchor, relation, self.mask[0])
        tokens = [anchor, relation, mask]
        if side == "head":
            tokens.reverse()
        states = torch.stack(tokens, -2).reshape(-1, 3, self.dim) + self.positions
        states = self.encoder(self.hidden_dropout(self.input_norm(states)))
        return self.output(states[:, _POSITIONS[side]]).view(anchor.shape)
