"""Building blocks that scorers share: dropout, normalization of rows, initialization of layers.

Scorers normalize rows where a paper uses BatchNorm, which depends on the batch of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.kernels.operators import dropped

Fill = Callable[[np.random.Generator, np.ndarray], object]  # fills an array in place


class Dropout(nn.Dropout):
    """torch's dropout; on a CPU with other draws, which depend on torch's generator state only."""

    def forward(self, input: Tensor) -> Tensor:
        return dropped(input, self.p) if self.training and self.p else input


class UnitNorm(nn.Module):
    """Scale rows to Euclidean length 1; zero rows stay zero: (..., D) -> (..., D)."""

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.normalize(rows, dim=-1)


def normalization_of(name: str, dim: int) -> nn.Module:
    """Return the layer of model.normalization for rows of dim elements."""
    if name == "layer":
        return nn.LayerNorm(dim)
    return UnitNorm() if name == "unit" else nn.Identity()


def init_layers(module: nn.Module, stream: np.random.Generator) -> None:
    """Initialize the linear, convolution and attention layers inside a module; biases are set to 0.

    Weights are uniform within 1 / sqrt(inputs per unit), torch's default. Scales and shifts of
    normalization layers keep their initial 1 and 0.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            weight, bias = layer.weight, layer.bias
        elif isinstance(layer, nn.MultiheadAttention):  # its output projection is an nn.Linear
            weight, bias = layer.in_proj_weight, layer.in_proj_bias
        else:
            continue
        uniform(weight, 1 / math.sqrt(weight[0].numel()), stream)
        if bias is not None:
            nn.init.zeros_(bias)


def uniform(parameter: Tensor, bound: float, stream: np.random.Generator) -> None:
    """Fill a parameter with values drawn uniformly from [-bound, bound)."""
    drawn = stream.uniform(-bound, bound, parameter.shape)
    parameter.copy_(torch.from_numpy(drawn))
