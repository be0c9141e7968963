"""Penalties on the rows that a batch touches, so that they cost O(batch), never O(table).

Shapes: C chunks, b triples a chunk, D numbers a row.
"""

from __future__ import annotations

from torch import Tensor

from kge_torchrec.models.scorers.complex_numbers import parts


def n3(rows: Tensor, is_complex: bool) -> Tensor:
    """Nuclear 3-norm penalty (Lacroix et al. 2018): sum of |x|^3.  (C, b, D) -> (C, b)

    For complex scorers |x| is the modulus.
    """
    if not is_complex:
        return rows.abs().pow(3).sum(-1)
    real, imaginary = parts(rows)
    # |z|^2 first: its gradient is finite at z = 0, that of |z| is not.
    return (real.square() + imaginary.square() + 1e-30).pow(1.5).sum(-1)


def l2(rows: Tensor) -> Tensor:
    """Sum of squares.  (C, b, D) -> (C, b)"""
    return rows.square().sum(-1)
