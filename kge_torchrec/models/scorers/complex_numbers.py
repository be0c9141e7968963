"""Rows of D real numbers read as D/2 complex ones, interleaved: (re, im, re, im, ...)."""

from __future__ import annotations

import torch
from torch import Tensor


def as_complex(rows: Tensor) -> Tensor:
    """(..., D) real -> (..., D/2) complex view."""
    return torch.view_as_complex(rows.unflatten(-1, (-1, 2)))


def as_real(numbers: Tensor) -> Tensor:
    """(..., D/2) complex -> (..., D) real view."""
    return torch.view_as_real(numbers).flatten(-2)
