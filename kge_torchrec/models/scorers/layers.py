"""What scorers are built of besides their formula: the normalization of rows, the start of layers.

The normalization is in place of BatchNorm wherever a paper has that: BatchNorm depends on the batch
that a rank happens to see, so that one rank and two would train different models; what is here
looks at one row alone.  The start is a function of the seed's stream, on any device and rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

Fill = Callable[[np.random.Generator, np.ndarray], object]  # draws into an array, in place


class UnitNorm(nn.Module):
    """Rows of Euclidean length 1; a row of zeros stays.  (..., D) -> (..., D)"""

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.normalize(rows, dim=-1)


def normalization_of(name: str, dim: int) -> nn.Module:
    """The normalization of rows of dim numbers: none, unit or layer (with scale and shift)."""
    made: dict[str, Callable[[], nn.Module]] = {
        "none": nn.Identity,
        "unit": UnitNorm,
        "layer": lambda: nn.LayerNorm(dim),
    }
    return made[name]()


def init_layers(module: nn.Module, stream: np.random.Generator) -> None:
    """Weights of linear, convolution and attention layers inside a module; biases start at 0.

    Weights are uniform within 1 / sqrt(inputs of a unit), as torch starts its layers; scales and
    shifts of normalizations stay as they are made, 1 and 0.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            _start(layer.weight, layer.bias, stream)
        elif isinstance(layer, nn.MultiheadAttention):  # its output layer is an nn.Linear
            _start(layer.in_proj_weight, layer.in_proj_bias, stream)


def uniform(parameter: Tensor, bound: float, stream: np.random.Generator) -> None:
    """Fills a parameter with numbers in [-bound, bound)."""
    drawn = stream.uniform(-bound, bound, parameter.shape)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(drawn))


def _start(weight: Tensor, bias: Tensor | None, stream: np.random.Generator) -> None:
    uniform(weight, 1 / math.sqrt(weight[0].numel()), stream)
    if bias is not None:
        nn.init.zeros_(bias)
