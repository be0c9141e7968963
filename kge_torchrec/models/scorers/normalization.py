"""Normalization of rows, in place of BatchNorm wherever a paper has that.

BatchNorm depends on the batch that a rank happens to see, so that one rank and two would train
different models; what is here looks at one row alone.
"""

from __future__ import annotations

from torch import Tensor, nn


class UnitNorm(nn.Module):
    """Rows of Euclidean length 1; a row of zeros stays.  (..., D) -> (..., D)"""

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.normalize(rows, dim=-1)


def normalization_of(name: str, dim: int) -> nn.Module:
    """The normalization of rows of dim numbers: none, unit or layer (with scale and shift)."""
    return {"none": nn.Identity, "unit": UnitNorm, "layer": lambda: nn.LayerNorm(dim)}[name]()
