"""Penalties on the rows that a batch touches, so that they cost O(batch), never O(table).

Shapes: D numbers a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kge_torchrec.models.ops import parts


class Regularizer:
    """A penalty on each row of a triple, added to the triple's loss with a weight.

    Subclasses give ``penalty``; with ``Options`` of their own they take those by name besides.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of this regularizer, as ``loss.regularizers`` of the config gives them.

        Args:
            weight: Factor of the penalty in the loss.
        """

        weight: float = 0.0

    def __init__(self, weight: float = 0.0):
        self.weight = weight

    def penalty(self, rows: Tensor, is_complex: bool) -> Tensor:
        """(..., D) -> (...).  is_complex: the D numbers are D/2 complex ones, (re, im, re, ...)."""
        raise NotImplementedError


class N3(Regularizer):
    """Nuclear 3-norm (Lacroix et al. 2018): sum of |x|^3, of complex numbers their modulus."""

    def penalty(self, rows: Tensor, is_complex: bool) -> Tensor:
        if not is_complex:
            return rows.abs().pow(3).sum(-1)
        real, imaginary = parts(rows)
        # |z|^2 first: its gradient is finite at z = 0, that of |z| is not.
        return (real.square() + imaginary.square() + 1e-30).pow(1.5).sum(-1)


class L2(Regularizer):
    """Sum of squares."""

    def penalty(self, rows: Tensor, is_complex: bool) -> Tensor:
        return rows.square().sum(-1)


class Regularizers:
    """The weighted sum of several: of the two that every config has, and of others."""

    def __init__(self, n3: float = 0.0, l2: float = 0.0, others: Iterable[Regularizer] = ()):
        self.n3, self.l2 = n3, l2
        self._used = [part for part in (N3(n3), L2(l2), *others) if part.weight]

    @property
    def any(self) -> bool:
        """Whether there is one at all."""
        return bool(self._used)

    def of(self, rows: Tensor, is_complex: bool) -> Tensor:
        """(..., D) rows -> (...): their weighted penalties."""
        out = torch.zeros(rows.shape[:-1], device=rows.device)
        for part in self._used:
            out = out + part.weight * part.penalty(rows, is_complex)
        return out
