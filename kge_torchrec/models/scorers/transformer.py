"""A transformer as a scorer.

Shapes: D elements per entity row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import PositiveInt
from kge_torchrec.kernels.comparisons import InnerProduct
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.models.scorers.layers import Fill

_POSITIONS = {"head": 0, "tail": 2}  # of the mask token, by side


class CoKE(Scorer):
    """Passes entity, relation and a mask token, with position embeddings, through a transformer.

    An entity row holds D real numbers. The final state of the mask goes through an output layer and
    is compared with entity rows. The head query (?, r, t) has the tokens [MASK], r, t. Without
    reciprocal relations the two sides score a triple differently, as in the paper. The authors'
    code adds a bias per entity, which the paper's formula lacks; it is left out. hidden_dropout
    also applies inside the encoder.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the transformer."""

        layers: PositiveInt = 6
        """Number of transformer layers."""
        heads: PositiveInt = 4
        """Number of attention heads."""
        feed_forward_dim: PositiveInt | None = None
        """Width of the feed-forward layers; null: 2 model.dim."""

    name = "coke"
    comparison = InnerProduct()
    start = ("xavier_normal", 1.0)
    formula = (
        "CoKE (Wang et al. 2019): score(h, r, t) = <z, t>, z a transformer's state of the masked t."
    )

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        dim, heads, dropout = self.dim, self.options.heads, self.hidden_dropout.p
        width = self.options.feed_forward_dim or 2 * dim
        self.mask = nn.Parameter(torch.empty(1, dim))
        self.positions = nn.Parameter(torch.empty(3, dim))
        self.input_norm = nn.LayerNorm(dim)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, heads, width, dropout, "gelu", batch_first=True),
            self.options.layers,
            enable_nested_tensor=False,
        )
        self.output = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))

    @classmethod
    def multiple_of(cls, options: Options) -> int:
        return options.heads

    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Initialize relations, mask and positions from the configured distribution."""
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
