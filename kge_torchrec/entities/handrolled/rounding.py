"""Stochastic rounding to bfloat16: up or down at random, such that the mean is the number itself.

Rounding to the nearest loses every change that is smaller than half the distance between two
neighbours; with a beta of 0.999 a second moment then stops at a quarter of its value.  Here a
number between two neighbours goes to the upper one with the probability that its place between
them says, so small changes arrive on average (Gupta et al., Deep Learning with Limited Numerical
Precision, 2015).

The random bits are no stream that is drawn one after another but a function of where they are
used: (step, which state, global row, column).  The same run on other ranks, in other pieces, on
another device or after a resume therefore rounds the same way.  That function is SplitMix64
(Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014), of which any number
can be computed without those before it.

Shapes: u rows, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(number: int) -> int:
    """The int64 with the bits of a 64-bit number; products of int64 tensors wrap around."""
    return number - (1 << 64) if number >> 63 else number


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FACTOR_1 = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2 = _signed(0x94D049BB133111EB)
_UPPER_HALF = _signed(0xFFFFFFFFFFFF0000)  # of a float32: what bfloat16 keeps


def _fold_(numbers: Tensor, shift: int) -> Tensor:
    """numbers ^= numbers >> shift; torch shifts the sign in, so that is masked away."""
    upper = (numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)
    return numbers.bitwise_xor_(upper)


def _split_mix(start: Tensor, index: Tensor) -> Tensor:
    """Number ``index``, from 0, of the SplitMix64 stream from ``start``; int64, broadcast."""
    numbers = start + (index + 1) * _GAMMA
    _fold_(numbers, 30).mul_(_FACTOR_1)
    _fold_(numbers, 27).mul_(_FACTOR_2)
    return _fold_(numbers, 31)


def random_bits(rows: Tensor, columns: int, step: int, state: int) -> Tensor:
    """(u, K) int32 in [0, 65536) on the device of ``rows``, independent and uniform.

    Args:
        rows: (u,) int64, global numbers of the rows.
        columns: K.
        step: number of the optimizer's step.
        state: number of the state within its optimizer.
    """
    key = _split_mix(torch.tensor(0), torch.tensor(step))
    key = _split_mix(key, torch.tensor(state))
    row_keys = _split_mix(key, rows)
    # A number of 64 bits serves four columns.
    index = torch.arange(-(-columns // 4), device=rows.device)
    quarters = _split_mix(row_keys.unsqueeze(1), index).view(torch.int16)
    return quarters[:, :columns].to(torch.int32).bitwise_and_(0xFFFF)


def round_stochastically(values: Tensor, rows: Tensor, step: int, state: int) -> Tensor:
    """(u, K) bfloat16 from ``values`` (u, K) float32; the other arguments as ``random_bits``.

    A number that bfloat16 has stays what it is, as do infinities and NaN.  Beyond the largest
    bfloat16, 3.39e38, the upper neighbour is infinity, as it is when rounding to the nearest.
    """
    bits = values.view(torch.int32) + random_bits(rows, values.shape[1], step, state)
    rounded = bits.bitwise_and_(_UPPER_HALF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
