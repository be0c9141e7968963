"""conv(h, r) of ConEx, ConvQ and ConvO: a convolution over the components of two rows.

Shapes: n components a number, D numbers a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kge_torchrec.models.scorers.algebra import components
from kge_torchrec.models.scorers.base import DotScorer


class ResidualConvolution(nn.Module):
    """f(vec(f([h; r] * w)) W): an image of 2 n rows, one for each component, of D/n numbers.

    Filters are padded to keep the image's size.  f is ReLU after a normalization by layer, which
    the authors' code does by batch.  feature_dropout: of whole feature maps.
    """

    def __init__(
        self, dim: int, units: int, channels: int, kernel_size: int, feature_dropout: float,
        outputs: int,
    ):  # fmt: skip
        super().__init__()
        self.units = units
        self.convolution = nn.Conv2d(1, channels, kernel_size, padding=kernel_size // 2)
        self.map_norm = nn.GroupNorm(1, channels)
        self.feature_dropout = nn.Dropout2d(feature_dropout)
        self.linear = nn.Linear(channels * 2 * dim, outputs)
        self.output_norm = nn.LayerNorm(outputs)

    def forward(self, head: Tensor, relation: Tensor) -> Tensor:
        """(..., D), (..., D) -> (..., outputs)"""
        head, relation = torch.broadcast_tensors(head, relation)
        parts = [components(x, self.units).transpose(-1, -2) for x in (head, relation)]
        image = torch.cat(parts, -2)  # (..., 2 n, D/n)
        maps = self.map_norm(self.convolution(image.reshape(-1, 1, *image.shape[-2:]))).relu()
        out = self.output_norm(self.linear(self.feature_dropout(maps).flatten(1))).relu()
        return out.view(*head.shape[:-1], out.shape[-1])


class ConvolvedScorer(DotScorer):
    """A scorer that joins a product of h and r with conv(h, r).  Answers tail queries only.

    units: n; outputs: numbers that the convolution returns, in D.  Raises ValueError when not
    reciprocal.
    """

    units: int
    outputs = 1

    def __init__(
        self, num_relations: int, dim: int, reciprocal: bool = True, *, channels: int = 32,
        kernel_size: int = 3, feature_dropout: float = 0.0, **shared: Any,
    ):  # fmt: skip
        options = {"channels": channels, "kernel_size": kernel_size,
                   "feature_dropout": feature_dropout}  # fmt: skip
        super().__init__(num_relations, dim, reciprocal, options=options, **shared)
        self.convolution = ResidualConvolution(
            dim, self.units, channels, kernel_size, feature_dropout, self.outputs * dim
        )
